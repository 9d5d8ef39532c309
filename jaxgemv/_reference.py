"""The product in plain jax.numpy, in float32: the oracle of the tests, and what runs where there is no kernel.

Memory is that of one dequantised matrix, or of a few: slices of x that meet different entries of a stack are taken one
after another (or some side by side), and those of one entry together.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgemv import _grouped
from jaxgemv._format import spread, unpack, weights
from jaxgemv._operands import Operands, Static, in_range, nowhere
from jaxgemv._shapes import any_rank, known

# Bytes of dequantised matrices that may exist at the same time, if one is not larger.
_SIDE_BY_SIDE = 64 << 20
# Rows of x for which a matrix is dequantised once. More would only make tiles that are mostly empty.
_ROWS = 512


def product(o: Operands, s: Static) -> Array:
    """x (*P, *L, K) times the weight's rows, (*P, *L, N); see Operands and Static. Without the parts around it."""
    n, k = o.packed.shape[-2], s.k or o.x.shape[-1]
    return of_entries(partial(_quantized, s=s), o, s, n if s.k is None else k, nbytes=4 * n * k)


def loop(o: Operands, s: Static) -> Array:
    """The same for few rows of a small matrix, without index, in a form of which XLA makes one kernel on a GPU."""
    return of_entries(partial(_quantized, s=s, dot=_sums), o, s, o.packed.shape[-2], nbytes=0)


def dense_product(o: Operands, s: Static) -> Array:
    """The same for a float weight (N, K), or with index a stack (S, N, K) of them."""
    n, k = o.packed.shape[-2:]
    nbytes = n * k * o.packed.dtype.itemsize
    precision = (s.precision or "default") if o.many else "highest"
    return of_entries(partial(_dense, precision=precision), o, s, n, nbytes=nbytes)


def _quantized(x: Array, w: Mapping[str, Array], s: Static, dot: Callable | None = None) -> Array:
    """x (..., K) and the arrays of one matrix, to float32 or int32 (..., N)."""
    w = {name: a for name, a in w.items() if name != "bias"}
    if "scale" not in w:
        return _integer_product(x, **w, bits=s.bits, group=s.group)
    k = s.k or x.shape[-1]
    weight = weights(**w, bits=s.bits, group=s.group, k=k)
    return (dot or contract)(x.astype(jnp.float32), weight if s.k is None else weight.T)


def _sums(x: Array, w: Array) -> Array:
    return jnp.sum(x[..., None, :] * w, axis=-1)


def _dense(x: Array, w: Mapping[str, Array], precision: str) -> Array:
    weight = w["packed"]
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    # A GPU gains nothing by a sum for one row, and where vmap makes several rows of it, it would be no matmul.
    return jax.lax.platform_dependent(
        x.astype(dtype),
        weight.astype(dtype),
        cpu=partial(_dense_on_cpu, precision=precision),
        default=partial(contract, precision=precision),
    )


def _dense_on_cpu(x: Array, w: Array, precision: str) -> Array:
    """In float32: jaxlib 0.8 refuses some products of bfloat16 with a float32 result."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    if x.shape[:-1] not in ((), (1,)):
        return contract(x, w, precision)
    # XLA makes one loop of this; its bf16 dot is 10 times slower for one row.
    return jnp.sum(w * x.reshape(1, x.shape[-1]), axis=-1).reshape(*x.shape[:-1], w.shape[0])


def contract(
    x: Array, w: Array, precision: str = "highest", out_dtype=jnp.float32, transposed: bool = False
) -> Array:
    """x (..., K), w (N, K), or transposed (K, N) -> (..., N) of out_dtype, or int32.

    precision: of float32 operands, as in jax.numpy.
    """
    return jax.lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (0 if transposed else w.ndim - 1,)), ((), ())),
        # It matters for operands of float32 alone, which a GPU may round to TF32.
        precision=precision if x.dtype == jnp.float32 else "default",
        preferred_element_type=jnp.int32 if x.dtype == jnp.int32 else out_dtype,
    )


def pick(w: Mapping[str, Array], entry: Array | None) -> dict[str, Array]:
    """The arrays of one entry of a stack (an array with a single entry serves all); as they are where entry is None."""
    if entry is None:
        return dict(w)
    return {name: a[0] if a.shape[0] == 1 else jnp.asarray(a)[entry] for name, a in w.items()}


@any_rank
def of_entries(
    one: Callable, o: Operands, s: Static, width: int, *, nbytes: int, pick: Callable = pick
) -> Array:
    """`one(x, pick(arrays, entry))` for each slice of x, with bias, rounded once. nbytes: of the matrix `one` makes."""
    w = o.weight()
    if o.index is None:
        y = one(o.x, pick(w, None))
        return (y if o.bias is None else y + o.bias.astype(jnp.float32)).astype(s.out_dtype)

    bad = nowhere(s.out_dtype)
    if o.is_nothing:
        return jnp.full((*o.x.shape[:-1], width), bad)

    # Differentiated, it keeps x and index, and not what it dequantised.
    @partial(jax.checkpoint, prevent_cse=False)
    def of_slice(x, index):
        picked = pick(w, jnp.clip(index, 0, o.stack - 1))
        y = one(x, picked)
        if "bias" in picked:
            y = y + picked["bias"].astype(jnp.float32)
        return jnp.where(in_range(index, o.stack), y.astype(s.out_dtype), bad)

    if o.prefix == 0:
        return of_slice(o.x, o.index)

    def call(x, index):
        slices, rows = known(x.shape[0]), known(x.shape[1])
        cost = known(nbytes + 4 * (rows or 0) * width)
        chunk = 1 if cost is None else max(1, _SIDE_BY_SIDE // max(cost, 1))
        if slices is None or chunk >= slices:
            return jax.vmap(of_slice)(x, index)
        return jax.lax.map(lambda each: of_slice(*each), (x, index), batch_size=chunk)

    size = _grouped.tile_size(o.batch, o.rows, o.stack, nbytes=nbytes, share=_ROWS, platform="xla")
    if size > 1:
        call = partial(_grouped.in_tiles, call, stack=o.stack, size=size, platform="xla")
    y = call(o.x.reshape(o.batch, o.rows, o.x.shape[-1]), o.index.reshape(o.batch))
    return y.reshape(*o.x.shape[:-1], width)


def _integer_product(
    x: Array, packed: Array, zero: Array | None = None, *, bits: int, group: int | None
) -> Array:
    """The exact int32 sum of x * (q - zero)."""
    k = x.shape[-1]
    q = unpack(packed, bits, k).astype(jnp.int32)
    mid = np.int32(1 << bits - 1)
    shift = mid if zero is None else spread(zero, ndim=q.ndim, group=group, k=k, dtype=jnp.int32)
    return contract(x.astype(jnp.int32), q - shift)
