"""gemv in plain jax.numpy: the oracle of the tests, and what runs where there is no kernel."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgemv._format import spread, unpack, weights


def product(
    x: Array,
    packed: Array,
    scale: Array | None = None,
    zero: Array | None = None,
    offset: Array | None = None,
    codebook: Array | None = None,
    bias: Array | None = None,
    index: Array | None = None,
    *,
    bits: int,
    group: int | None,
    k: int | None = None,
    out_dtype,
) -> Array:
    """x (*P, *L, K) times the weight's rows: (*P, *L, N), from arrays that have been checked.

    With `k` it is the transposed product, x (*P, *L, N) times the weight's columns: (*P, *L, k).
    Without `index`, P is empty and the weight is (N, K). With `index` of shape P, every array of the weight has
    a leading stack dimension, S or 1, and slice p of x meets entry index[p]; one out of range gives NaN.
    """
    arrays = packed, scale, zero, offset, codebook, bias
    (packed, scale, zero, offset, codebook, bias), valid = _entries(index, arrays)
    if scale is None:
        y = _integer_product(x, packed, zero, bits=bits, group=group)
    else:
        w = weights(packed, scale, zero, offset, codebook, bits=bits, group=group, k=k or x.shape[-1])
        y = contract(x.astype(jnp.float32), w if k is None else w.swapaxes(-1, -2))
    return finish(y, bias, valid, out_dtype)


def dense_product(
    x: Array, w: Array, bias: Array | None = None, index: Array | None = None, *, out_dtype
) -> Array:
    """The same for a float weight (N, K), or with `index` a stack (S, N, K) of them."""
    (w, bias), valid = _entries(index, (w, bias))
    dtype = jnp.promote_types(x.dtype, w.dtype)
    if index is None and x.shape[:-1] in ((), (1,)):
        # XLA makes one loop of this everywhere; its bf16 dot on a CPU is 10 times slower for one row.
        product = w.astype(jnp.float32) * x.reshape(1, x.shape[-1]).astype(jnp.float32)
        y = jnp.sum(product, axis=-1).reshape(*x.shape[:-1], w.shape[0])
    else:
        # On a CPU in float32: jaxlib 0.8 there refuses some products of bfloat16 with a float32 result.
        y = jax.lax.platform_dependent(
            x.astype(dtype),
            w.astype(dtype),
            cpu=lambda x, w: contract(x.astype(jnp.float32), w.astype(jnp.float32)),
            default=contract,
        )
    return finish(y, bias, valid, out_dtype)


def contract(x: Array, w: Array) -> Array:
    """x (*P, *L, K), w (*P, N, K) -> float32 (*P, *L, N)."""
    prefix = tuple(range(w.ndim - 2))
    # Only float32 needs to be told not to round its operands (to TF32, on a GPU).
    full = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (w.ndim - 1,)), (prefix, prefix)),
        precision=jax.lax.Precision.HIGHEST if full else None,
        preferred_element_type=jnp.int32 if x.dtype == jnp.int32 else jnp.float32,
    )


def finish(y: Array, bias: Array | None, valid: Array | None, out_dtype) -> Array:
    """Adds the bias, marks the slices whose index was out of range, rounds once."""
    if bias is not None:
        bias = bias.astype(jnp.float32)
        middle = (1,) * (y.ndim - bias.ndim)
        y = y + bias.reshape(*bias.shape[:-1], *middle, bias.shape[-1])
    if valid is not None:
        bad = np.asarray(np.nan if y.dtype == jnp.float32 else np.iinfo(np.int32).min, y.dtype)
        y = select(valid, y, bad)
    return y.astype(out_dtype)


def select(valid: Array, y: Array, other) -> Array:
    """The slices of y that are valid, and `other` in place of the rest."""
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (y.ndim - valid.ndim)), y, other)


def _entries(index: Array | None, arrays: tuple) -> tuple[tuple, Array | None]:
    """Of each stacked array the entries that index picks, and where index was in range; without it, as they are."""
    if index is None:
        return arrays, None
    entry = jnp.clip(index, 0, _stack_of(arrays) - 1)
    # An array of one entry serves every index.
    picked = (a if a is None else a[jnp.zeros_like(entry) if a.shape[0] == 1 else entry] for a in arrays)
    return tuple(picked), in_range(index, arrays)


def in_range(index: Array, arrays: Iterable[Array | None]) -> Array:
    """Where an index is one of an entry of stacked arrays."""
    return (index >= 0) & (index < _stack_of(arrays))


def _stack_of(arrays: Iterable[Array | None]) -> int:
    return max(a.shape[0] for a in arrays if a is not None)


def _integer_product(x: Array, packed: Array, zero: Array | None, *, bits: int, group: int | None) -> Array:
    """The exact int32 sum of x * (q - zero)."""
    k = x.shape[-1]
    q = unpack(packed, bits, k).astype(jnp.int32)
    mid = np.int32(1 << bits - 1)
    shift = mid if zero is None else spread(zero, ndim=q.ndim, group=group, k=k, dtype=jnp.int32)
    return contract(x.astype(jnp.int32), q - shift)
