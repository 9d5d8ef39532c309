"""A kernel of any rank, as its layer knows it, over the (N, K) matrix of codes that products read."""

import dataclasses
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxgemv import QuantizedTensor, gemv, quantize, quantize_activations
from jaxgemv._tree import of_array


class Layout(NamedTuple):
    """What the axes of a kernel are. All others than these are outputs."""

    sizes: tuple[int, ...]
    inner: tuple[int, ...]  # summed over: K, in this order
    batch: tuple[int, ...] = ()  # also axes of x: stacks of the tensor

    @property
    def outer(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.sizes)) if a not in self.inner and a not in self.batch)

    @property
    def k(self) -> int:
        return prod(self.sizes[a] for a in self.inner)

    def matrix(self, kernel: Array) -> tuple[Array, int]:
        """(..., *sizes) as (..., *batch, N, K) or (..., *batch, K, N), and which axis is K."""
        extra = kernel.ndim - len(self.sizes)
        batch, inner, outer = (
            tuple(extra + a for a in axes) for axes in (self.batch, self.inner, self.outer)
        )
        lead = (*range(extra), *batch)
        shape = [kernel.shape[a] for a in lead]
        if (*lead, *inner, *outer) == tuple(range(kernel.ndim)):  # as it lies
            return kernel.reshape(*shape, self.k, -1), -2
        return jnp.transpose(kernel, (*lead, *outer, *inner)).reshape(*shape, -1, self.k), -1

    def names(self, of_axes, ndim: int) -> tuple:
        """What is said of each of a kernel's `ndim` axes (a name, a mesh axis, None), said of (..., N, K)."""
        of_axes = (*of_axes, *(None,) * (ndim - len(of_axes)))
        extra = ndim - len(self.sizes)

        def first(axes):
            return next((each for a in axes if (each := of_axes[extra + a]) is not None), None)

        lead = (*of_axes[:extra], *(of_axes[extra + a] for a in self.batch))
        return (*lead, first(self.outer), first(self.inner))

    def quantize(self, kernel: Array, **arguments: Any) -> QuantizedTensor:
        """(..., *batch, N, K), cut as the kernel is."""

        def make(kernel):
            matrix, in_axis = self.matrix(kernel)
            return quantize(matrix, in_axis=in_axis, **arguments)

        return of_array(kernel, make, self.names)


@partial(jax.tree_util.register_dataclass, data_fields=("tensor",), meta_fields=("layout", "x_bits"))
@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a quantised layer: `shape` and `dtype` are those that the layer's own had.

    - tensor: the `QuantizedTensor`, (..., N, K): N the outputs, K the inputs of each.
    """

    tensor: QuantizedTensor
    layout: Layout
    x_bits: int | None = None  # 8: x is rounded to int8 first

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, n, k = self.tensor.shape
        sizes, batch = list(self.layout.sizes), len(self.layout.batch)
        # Where several axes became one, the first may be cut, by shard_map, say.
        for axes, size in ((self.layout.outer, n), (self.layout.inner, k)):
            if axes:
                sizes[axes[0]] = size // prod(sizes[a] for a in axes[1:])
        for a, size in zip(self.layout.batch, lead[len(lead) - batch :]):
            sizes[a] = size
        return (*lead[: len(lead) - batch], *sizes)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """The float kernel in its own shape, as `jaxgemv.dequantize` computes it."""
        w = self.tensor.dequantize(dtype)
        layout, shape = self.layout, self.shape
        extra = len(shape) - len(layout.sizes)
        order = [*range(extra), *(extra + a for a in (*layout.batch, *layout.outer, *layout.inner))]
        return jnp.transpose(w.reshape([shape[a] for a in order]), tuple(np.argsort(order)))

    def astype(self, dtype: DTypeLike) -> "Kernel":
        """Itself: products choose their dtype."""
        return self

    def __getitem__(self, key) -> "Kernel":
        if key is not Ellipsis:
            raise TypeError(f"Kernel: index must be ...; got {key!r}; kernel.dequantize() is the float array")
        return self

    __array_ufunc__ = None  # so that numpy asks us

    def __rmatmul__(self, x):
        raise TypeError(
            "Kernel: x @ kernel is not there; call the layer, or write x @ kernel.tensor.T, or "
            "jaxgemv.gemv(x, kernel.tensor)"
        )


def dot_general(
    op: str,
    x: Array,
    kernel: Kernel,
    dimension_numbers,
    *,
    bias=None,
    out_dtype=None,
    out_sharding=None,
    implementation=None,
) -> Array:
    """`jax.lax.dot_general(x, kernel, dimension_numbers)`; bias has the kernel's batch and output axes."""
    layout = kernel.layout
    (x_inner, k_inner), (x_batch, k_batch) = dimension_numbers
    if set(k_inner) != set(layout.inner) or set(k_batch) != set(layout.batch):
        raise ValueError(
            f"{op}: the kernel {kernel.shape} was quantised for products over its axes {layout.inner} with batch "
            f"axes {layout.batch}; got {tuple(k_inner)} and {tuple(k_batch)}"
        )
    inner = [x_inner[k_inner.index(a)] for a in layout.inner]
    batch = [x_batch[k_batch.index(a)] for a in layout.batch]
    rest = [a for a in range(x.ndim) if a not in inner and a not in batch]
    expected, got = (
        [shape[a] for a in axes] for shape, axes in ((kernel.shape, layout.inner), (x.shape, inner))
    )
    if len(inner) > 1 and expected != got:
        raise ValueError(f"{op}: x must have sizes {expected} along axes {inner}; got {got}, shape {x.shape}")

    x = jnp.transpose(x, (*batch, *rest, *inner))
    lead = x.shape[: len(batch) + len(rest)]
    x = x if len(inner) == 1 else x.reshape(*lead, prod(x.shape[len(lead) :]))
    outer = [kernel.shape[a] for a in layout.outer]
    single = len(outer) == 1
    if bias is not None and not single:
        bias = jnp.reshape(bias, (*lead[: len(batch)], prod(outer)))

    x_scale = None
    if kernel.x_bits == 8:
        out_dtype = out_dtype or x.dtype
        x, x_scale = quantize_activations(x, group_size=_x_group(kernel.tensor, x.shape[-1]))

    def multiply(x, x_scale, w, bias):
        merged = None if out_sharding is None or batch else _merged(out_sharding, len(rest))
        options = {"out_dtype": out_dtype, "out_sharding": merged, "implementation": implementation}
        return gemv(x, w, bias=bias, x_scale=x_scale, **options)

    for _ in batch:
        multiply = jax.vmap(multiply)
    y = multiply(x, x_scale, kernel.tensor, bias)
    if not single:
        y = jax.lax.reshape(y, (*lead, *outer), out_sharding=None if batch else out_sharding)
    # Batch axes in the order that was asked for.
    order = [layout.batch.index(a) for a in k_batch]
    y = jnp.transpose(y, (*order, *range(len(order), y.ndim)))
    return jax.sharding.reshard(y, out_sharding) if batch and out_sharding is not None else y


def _x_group(w: QuantizedTensor, k: int) -> int | None:
    """Codes of x that share a scale: as many as in the weight, if these are even parts."""
    groups = w.scale.shape[-1] if w.scale is not None and w.scale.ndim == w.ndim else 1
    return k // groups if groups > 1 and k % groups == 0 and not w.group_size else None


def _merged(sharding, rest: int):
    """The sharding of (*rest, *outer) for (*rest, N)."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    spec = PartitionSpec(*spec[:rest], *(s for s in spec[rest : rest + 1]))
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
