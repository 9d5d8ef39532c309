"""`QuantLinear`: `flax.nnx.Linear` over a low-bit kernel."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError('jaxgemv.flax.nnx needs Flax: pip install "jaxgemv[flax]"') from error

import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemv import QuantizedTensor, quantize
from jaxgemv._formats import GroupSize, resolve
from jaxgemv._tensor import ARRAYS
from jaxgemv.flax import _layer

# What Flax has called the metadata that names a Variable's axes, newest first.
_AXIS_NAMES = ("out_sharding", "sharding_names", "sharding")


class QuantizedKernel(nnx.Variable):
    """One array of a quantised kernel. Not an `nnx.Param`, so that gradients and optimizers leave it alone."""


class QuantLinear(nnx.Module):
    """A linear layer over the last dimension, with the arguments of `nnx.Linear` and a kernel of low-bit codes.

    State: `bias`, an `nnx.Param`, and the arrays of a `jaxgemv.QuantizedTensor` of shape (out_features,
    in_features) as `QuantizedKernel`s: `packed`, `scale`, and `zero` unless symmetric, or what the format has instead
    (an imported kernel may bring others). Axis names on the kernel (`nnx.with_partitioning`, `kernel_metadata`) pass
    to its arrays, out before in.

    - use_bias, dtype, param_dtype, kernel_init, bias_init, preferred_element_type, rngs, kernel_metadata,
      bias_metadata: as in `nnx.Linear`. The result has the computation's dtype, to which the kernel adds the dtype
      of its scale, unless `preferred_element_type` is given.
    - precision: None, DEFAULT or HIGHEST, all of which mean float32 sums.
    - dot_general, promote_dtype: only the defaults.
    - bits, format, group_size, symmetric, method, scale_dtype: as in `jaxgemv.quantize`; the attributes bits and
      group_size are those of the format, or the defaults. implementation: as in `jaxgemv.gemv`.

    Raises ValueError for the arguments above, and what `jaxgemv.quantize` and `jaxgemv.gemv` raise.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Any = lax.dot_general,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        bits: int | None = None,
        format: str | None = None,
        group_size: GroupSize = "default",
        symmetric: bool = False,
        method: str = "mse",
        scale_dtype: Dtype | None = None,
        implementation: str | None = None,
    ):
        _layer.check_precision("QuantLinear", precision)
        _layer.check_default("QuantLinear", "dot_general", dot_general, lax.dot_general)
        _layer.check_default("QuantLinear", "promote_dtype", promote_dtype, default_promote_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.preferred_element_type = preferred_element_type
        self.bits, self.group_size = resolve("quantize", format, bits, group_size)
        self.format = format
        self.symmetric = symmetric
        self.method = method
        self.scale_dtype = scale_dtype
        self.implementation = implementation

        shape = (in_features, out_features)
        kernel = _param(kernel_init(rngs.params(), shape, param_dtype), kernel_metadata)
        w = quantize(
            kernel[...],
            bits=bits,
            format=format,
            group_size=group_size,
            symmetric=symmetric,
            method=method,
            in_axis=-2,
            scale_dtype=scale_dtype,
        )
        for name in ARRAYS:
            array = getattr(w, name)
            if array is not None:
                array = QuantizedKernel(array, **_metadata(kernel, w.ndim, name, array.ndim))
            setattr(self, name, nnx.data(array))
        bias = None
        if use_bias:
            bias = _param(bias_init(rngs.params(), (out_features,), param_dtype), bias_metadata)
        self.bias = nnx.data(bias)

    @property
    def kernel(self) -> QuantizedTensor:
        """The weight, of shape (out_features, in_features)."""
        variables = {name: getattr(self, name) for name in ARRAYS}
        arrays = {name: v[...] for name, v in variables.items() if v is not None}
        return _layer.weight(arrays, bits=self.bits, group_size=self.group_size, k=self.in_features)

    def __call__(self, inputs: Array, out_sharding=None) -> Array:
        """inputs (..., in_features) to (..., out_features). out_sharding: as in `jaxgemv.gemv`, for Explicit axes."""
        return _layer.product(
            inputs,
            self.kernel,
            None if self.bias is None else self.bias[...],
            dtype=self.dtype,
            out_dtype=self.preferred_element_type,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        *,
        bits: int | None = None,
        format: str | None = None,
        group_size: GroupSize = "default",
        symmetric: bool = False,
        method: str = "mse",
        scale_dtype: Dtype | None = None,
        implementation: str | None = None,
    ) -> "QuantLinear":
        """The layer that stands for `linear`, with a copy of its bias.

        A kernel with leading dimensions, (..., in, out), as `nnx.vmap` stacks it, becomes a stack. Raises TypeError
        for another layer, also one derived from `nnx.Linear` that computes something else, such as `nnx.LoRALinear`.
        """
        _layer.check_type("QuantLinear.from_linear", "linear", linear, nnx.Linear)
        return cls(
            linear.in_features,
            linear.out_features,
            use_bias=linear.use_bias,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            precision=linear.precision,
            kernel_init=lambda *_: linear.kernel,
            bias_init=lambda *_: linear.bias,
            dot_general=linear.dot_general,
            promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type,
            rngs=nnx.Rngs(0),
            bits=bits,
            format=format,
            group_size=group_size,
            symmetric=symmetric,
            method=method,
            scale_dtype=scale_dtype,
            implementation=implementation,
        )


def _param(value, metadata: Mapping) -> nnx.Variable:
    """A Param of what an initialiser gives, or a copy of the Variable that `from_linear` hands over."""
    return value.copy() if isinstance(value, nnx.Variable) else nnx.Param(value, **metadata)


def _metadata(kernel: nnx.Variable, kernel_ndim: int, array: str, ndim: int) -> dict[str, Any]:
    """The kernel's metadata for one array of the weight: axis names reordered, hooks on its values left out."""

    def reorder(names):
        if isinstance(names, NamedSharding):
            return NamedSharding(names.mesh, reorder(names.spec))
        ours = _layer.out_in(names, kernel_ndim, array, ndim)
        return PartitionSpec(*ours) if isinstance(names, PartitionSpec) else ours

    metadata = {name: value for name, value in kernel.get_metadata().items() if not name.startswith("on_")}
    return metadata | {name: reorder(metadata[name]) for name in _AXIS_NAMES if metadata.get(name)}
