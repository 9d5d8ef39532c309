"""From groups of a float weight to codes and scales: the whole range of a group, or the least squared error.

Groups are float32 (..., G, g); scales and zeros (..., G). `importance`, float32 (G, g) or None, weights the squares,
and is 0 where a short last group is filled up. No array has as many elements as groups times candidates: a loop over
the candidates keeps the best of each group.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_E4M3_LARGEST, _E4M3_NAN, _E8M0_NAN = 0x7E, 0x7F, 0xFF  # bytes
# How much smaller, or larger, than min-max's a scale may be; for tables whose ends differ, with either sign.
_FACTORS = np.linspace(1.15, 0.7, 8, dtype=np.float32)
_NEIGHBOURS = {"float8_e4m3fn": range(-3, 7), "float8_e8m0fnu": range(-1, 2)}  # of min-max's byte


class Scales(NamedTuple):
    """Scale and maybe zero as min-max has them, and others to try: candidate(i) for each i below count."""

    first: tuple[Array, ...]
    candidate: Callable[[Array], tuple[Array, ...]]
    count: int


def affine(
    groups: Array, importance: Array | None, *, bits: int, symmetric: bool, dtype, mse: bool
) -> tuple[Array, Array, Array | None]:
    """uint8 codes, scale, zero (None if symmetric), so that `(codes - zero) * scale` is near to groups.

    min-max: 0.0 is always a code, so that a padded or pruned weight stays 0.
    mse: the best of 5 x 5 ranges, each end drawn in by up to 0.4 / bits of the range (if symmetric, of 13 scales for
    either sign), or a line fitted to the codes of the best.
    """
    top, mid = (1 << bits) - 1, 1 << bits - 1
    largest, least = groups.max(axis=-1), groups.min(axis=-1)
    high, low = jnp.maximum(largest, 0), jnp.minimum(least, 0)
    if bits == 1:
        scale = 2 * _mean(jnp.abs(groups), importance)
    elif symmetric:
        scale = jnp.maximum(high / (mid - 1), low / -mid)
    else:
        scale = (high - low) / top
    scale = _stored(jnp.where(_finite(groups), scale, jnp.nan), dtype)
    if bits == 1:
        zero = jnp.full_like(scale, 0.5)
    elif symmetric:
        zero = jnp.full_like(scale, mid)
    else:
        zero = jnp.clip(jnp.round(-low / _divisor(scale)), 0, top)

    def codes(scale, zero):
        return jnp.clip(jnp.round(groups / _divisor(scale)[..., None] + zero[..., None]), 0, top)

    def values(scale, zero):
        return codes(scale, zero) - zero[..., None]

    def of_range(low, high):
        scale = _stored((high - low) / top, dtype)
        return scale, _stored(-low / _divisor(scale), dtype)

    def shrunken(i):
        by = np.float32(0.1 / bits) * (largest - least)
        return of_range(least + by * (i % 5), largest - by * (i // 5))

    def scaled(i):
        # A negative scale gives the longer end of the codes to the other side.
        factor = 1 - np.float32(0.04) * (i // 2)
        negative = -jnp.maximum(high / mid, low / -(mid - 1))
        return _stored(factor * jnp.where(i % 2 == 0, scale, negative), dtype), zero

    def fitted(scale, zero):
        if symmetric:
            return _stored(_slope(values(scale, zero), groups, importance), dtype), zero
        q = codes(scale, zero)
        q_mean, mean = _mean(q, importance), _mean(groups, importance)
        slope = _slope(q - q_mean[..., None], groups - mean[..., None], importance)
        slope = _stored(slope, dtype)
        return slope, _stored(q_mean - mean / _divisor(slope), dtype)

    best = (scale, zero)
    if mse and bits > 1:
        scales = Scales(best, scaled, 26) if symmetric else Scales(best, shrunken, 25)
        best = _least(groups, importance, scales, values, fitted=fitted)
    scale, zero = best
    keeps_zero = not symmetric or bits == 1
    return (
        codes(scale, zero).astype(jnp.uint8),
        scale.astype(dtype),
        zero.astype(dtype) if keeps_zero else None,
    )


def table(
    groups: Array,
    importance: Array | None,
    *,
    values: np.ndarray,
    dtype,
    mse: bool,
    global_scale: Array | None = None,
) -> tuple[Array, Array]:
    """uint8 codes and scale, so that `values[codes] * scale` is near to groups, times global_scale (...,) if given.

    values: 16, or the 256 of float8_e4m3fn. A scale of one byte comes as uint8. min-max: the largest value of
    either sign stands for the largest magnitude of the group. In one byte it is rounded to nearest (e4m3), or to the
    next power of two that leaves nothing out (e8m0), as MLX does. mse: also other factors, or bytes near that one.
    """
    largest = np.nanmax(np.abs(values))
    magnitude = jnp.where(_finite(groups), jnp.abs(groups).max(axis=-1), jnp.nan)
    if dtype == jnp.float8_e8m0fnu:
        scales = _bytes(_power_of_two(magnitude, largest), dtype, 0xFE)
    elif dtype == jnp.float8_e4m3fn:
        if global_scale is not None:
            magnitude = magnitude / global_scale[..., None, None]
        scales = _bytes(_e4m3(magnitude / largest), dtype, _E4M3_LARGEST)
    else:
        scales = _factors(magnitude / largest, dtype, either_sign=-np.nanmin(values) != np.nanmax(values))

    def step(scale):
        if scale.dtype == jnp.uint8:
            scale = lax.bitcast_convert_type(scale, dtype).astype(jnp.float32)
        return scale if global_scale is None else scale * global_scale[..., None, None]

    def nearest(scale, of):
        return _nearest(groups / _divisor(step(scale))[..., None], values, of)

    def fitted(scale):
        return (_stored(_slope(nearest(scale, values), groups, importance), dtype),)

    (scale,) = scales.first
    if mse:
        (scale,) = _least(
            groups,
            importance,
            scales,
            lambda scale: nearest(scale, values),
            step=step,
            fitted=None if scale.dtype == jnp.uint8 else fitted,
        )
    stored = scale if scale.dtype == jnp.uint8 else scale.astype(dtype)
    return nearest(scale, np.arange(len(values), dtype=np.uint8)), stored


def _least(
    groups, importance, scales: Scales, values, step=lambda scale: scale, fitted=None
) -> tuple[Array, ...]:
    """The candidate with the least squared error for each group, of equal ones the first."""

    # Errors are in steps of min-max's scale, about, so that float32 holds the squares.
    by = unit(step(scales.first[0]))

    def with_error(found):
        error = jnp.square(groups * by[..., None] - values(*found) * (step(found[0]) * by)[..., None])
        return jnp.sum(error if importance is None else error * importance, axis=-1), *found

    def better(best, found):
        # Not where an error is NaN: a group with NaN keeps the NaN scale of min-max.
        less = found[0] < best[0]
        return tuple(jnp.where(less, new, old) for new, old in zip(found, best))

    def body(i, best):
        return better(best, with_error(scales.candidate(i)))

    best = lax.fori_loop(0, scales.count, body, with_error(scales.first))
    if fitted is not None:
        best = better(best, with_error(fitted(*best[1:])))
    return best[1:]


def _stored(a: Array, dtype) -> Array:
    """As that dtype will hold it, or NaN: XLA may divide by a scale by its reciprocal, and 2^-127 would be 0, as would
    all codes. The barrier keeps XLA from leaving out the rounding."""
    stored = lax.optimization_barrier(a.astype(dtype)).astype(jnp.float32)
    return jnp.where(jnp.abs(stored) <= 2.0**126, stored, jnp.nan)


def _finite(groups: Array) -> Array:
    # Asked of each weight: the maximum of a group with NaN need not be NaN on a CPU.
    return jnp.isfinite(groups).all(axis=-1)


def _divisor(scale: Array) -> Array:
    """scale, but 1 for 0: a group of zeros, or too small for the scale's dtype, has scale 0 and becomes exact zeros."""
    return jnp.where(scale == 0, 1, scale)


def unit(a: Array) -> Array:
    """A power of two that times a >= 0 is about 1, as far as float32 goes."""
    exponent = jnp.clip(lax.bitcast_convert_type(a, jnp.int32) >> 23, 1, 253)
    return lax.bitcast_convert_type(254 - exponent << 23, jnp.float32)


def _mean(a: Array, importance: Array | None) -> Array:
    if importance is None:
        return a.mean(axis=-1)
    return jnp.sum(a * importance, axis=-1) / _divisor(importance.sum(axis=-1))


def _slope(a: Array, b: Array, importance: Array | None) -> Array:
    """The factor with which a comes nearest to b."""
    weighted = a if importance is None else a * importance
    square = jnp.sum(weighted * a, axis=-1)
    return jnp.where(square == 0, jnp.nan, jnp.sum(weighted * b, axis=-1) / _divisor(square))


def _factors(scale: Array, dtype, *, either_sign: bool) -> Scales:
    factors = np.outer(_FACTORS, [1, -1] if either_sign else [1]).ravel().astype(np.float32)
    return Scales(
        (_stored(scale, dtype),), lambda i: (_stored(scale * jnp.asarray(factors)[i], dtype),), len(factors)
    )


def _bytes(byte: Array, dtype, last: int) -> Scales:
    """Positive floats of one byte are in the order of their bytes. A byte above `last` is NaN and stays alone."""
    near = _NEIGHBOURS[dtype.name]

    def candidate(i):
        other = jnp.clip(byte.astype(jnp.int32) + near.start + i, 0, last).astype(jnp.uint8)
        return (jnp.where(byte > last, byte, other),)

    return Scales((byte,), candidate, len(near))


def _power_of_two(magnitude: Array, largest) -> Array:
    """The byte of the least power of two that times `largest` is at least magnitude; 2^0 for 0."""
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    of_largest = np.float32(largest).view(np.int32)
    mantissa = np.int32(0x7FFFFF)
    is_above = (bits & mantissa) > (of_largest & mantissa)
    exponent = (bits >> 23) - (of_largest >> 23) + 127 + is_above.astype(jnp.int32)
    byte = jnp.where(magnitude == 0, 127, jnp.clip(exponent, 0, 0xFE))
    return jnp.where(jnp.isnan(magnitude), _E8M0_NAN, byte).astype(jnp.uint8)


def _e4m3(scale: Array) -> Array:
    byte = lax.bitcast_convert_type(jnp.minimum(scale, 448).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.where(jnp.isnan(scale), np.uint8(_E4M3_NAN), byte)


def _nearest(a: Array, values: np.ndarray, of: np.ndarray) -> Array:
    """of[i] for the i at which values[i] is nearest to a; at equal distance the one nearer to 0, and 0 is never -0.

    Of the 256 values of float8_e4m3fn, codes are their bytes, and of two the even one is taken.
    """
    if len(values) == 256:
        codes = jnp.clip(a, -448, 448).astype(jnp.float8_e4m3fn)
        return codes.astype(jnp.float32) if of is values else lax.bitcast_convert_type(codes, jnp.uint8)
    values, first = np.unique(values, return_index=True)
    found = jnp.full_like(a, of[first[0]], dtype=of.dtype)
    for i, middle in enumerate((values[1:] + values[:-1]) / 2):
        beyond = a > middle if middle > 0 else a >= middle
        found = jnp.where(beyond, of[first[i + 1]], found)
    return found
