"""From a float weight to a `QuantizedTensor`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxgemv._check import FLOATS, as_array, check_bits, check_group_size
from jaxgemv._format import pack_unsigned, pad_last
from jaxgemv._tensor import QuantizedTensor


def quantize(
    weight: ArrayLike,
    *,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    in_axis: int = -1,
    scale_dtype: DTypeLike | None = None,
) -> QuantizedTensor:
    """Rounds a float weight to the nearest b-bit codes between each group's minimum and maximum.

    - weight: (..., N, K), or with `in_axis` saying which axis is K: `in_axis=0` for a Flax (in, out) kernel.
    - group_size: codes along K that share a scale: scale (..., N, ceil(K / g)). None: one per row, scale (..., N).
    - symmetric: no zero array, the middle code is 0. Otherwise zero is the (integer) code of 0.0, in scale's dtype.
    - scale_dtype: float16, bfloat16 or float32; the weight's dtype by default.

    With bits=1 a group becomes plus and minus its mean magnitude (zero = 0.5). Works under `jit` and
    `jax.eval_shape`. Raises TypeError for dtypes, ValueError for shapes and values.
    """
    check_bits("quantize", bits)
    weight = as_array("quantize", "weight", weight)
    dtype = jnp.dtype(weight.dtype if scale_dtype is None else scale_dtype)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"quantize: weight must be a float array; got {weight.dtype}")
    if scale_dtype is None and dtype == jnp.float64:
        dtype = jnp.dtype(jnp.float32)
    if dtype not in FLOATS:
        raise TypeError(f"quantize: scale_dtype must be float16, bfloat16 or float32; got {dtype}")
    if weight.ndim < 2 or 0 in weight.shape[-2:]:
        raise ValueError(f"quantize: weight must have shape (..., N, K), N and K >= 1; got {weight.shape}")
    if not -weight.ndim <= in_axis < weight.ndim:
        raise ValueError(f"quantize: in_axis must be an axis of weight, {weight.shape}; got {in_axis}")
    if group_size is not None:
        check_group_size("quantize", group_size)
    return _quantize(
        jnp.asarray(weight, jnp.float32),
        bits=bits,
        group_size=group_size,
        symmetric=bool(symmetric),
        in_axis=in_axis,
        dtype=dtype,
    )


@partial(jax.jit, static_argnames=("bits", "group_size", "symmetric", "in_axis", "dtype"))
def _quantize(weight, *, bits, group_size, symmetric, in_axis, dtype):
    weight = jnp.moveaxis(weight, in_axis, -1)
    k = weight.shape[-1]
    g = min(group_size or k, k)
    groups = pad_last(weight, -k % g).reshape(*weight.shape[:-1], -1, g)
    top, mid = (1 << bits) - 1, 1 << bits - 1
    # 0.0 is always a code, so a padded or pruned weight stays 0.
    high = jnp.maximum(groups.max(axis=-1), 0)
    low = jnp.minimum(groups.min(axis=-1), 0)
    if bits == 1:
        count = jnp.minimum(g, k - jnp.arange(groups.shape[-2]) * g).astype(jnp.float32)
        scale = 2 * jnp.sum(jnp.abs(groups), axis=-1) / jnp.broadcast_to(count, groups.shape[:-1])
    elif symmetric:
        scale = jnp.maximum(high / (mid - 1), low / -mid)
    else:
        scale = (high - low) / top
    scale = scale.astype(dtype)
    step = scale.astype(jnp.float32)
    # A group of zeros, or one too small for the scale's dtype, becomes exact zeros.
    empty = step == 0
    step = jnp.where(empty, 1, step)
    if bits == 1:
        zero, code_of_zero = jnp.full_like(step, 0.5), jnp.full_like(step, 0.5)
    elif symmetric:
        zero, code_of_zero = None, jnp.full_like(step, mid)
    else:
        zero = code_of_zero = jnp.clip(jnp.round(-low / step), 0, top)
    codes = jnp.clip(jnp.round(groups / step[..., None] + code_of_zero[..., None]), 0, top)
    codes = codes.astype(jnp.uint8).reshape(*weight.shape[:-1], -1)[..., :k]
    if group_size is None:
        scale, zero = scale[..., 0], None if zero is None else zero[..., 0]
    return QuantizedTensor(
        packed=pack_unsigned(codes, bits),
        scale=scale,
        zero=None if zero is None else zero.astype(dtype),
        bits=bits,
        group_size=g if k % g else None,
        k=k if k * bits % 32 else None,
    )
