"""From a float weight to a `QuantizedTensor`."""

from functools import partial
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jaxgemv import _rounding
from jaxgemv._check import as_array
from jaxgemv._format import pack_unsigned, pad_last
from jaxgemv._formats import FORMATS, METHODS, GroupSize, resolve, resolve_scale_dtype
from jaxgemv._shapes import any_rank, known
from jaxgemv._tensor import QuantizedTensor

# Weights that are rounded at a time, so that what a search makes of them stays in a cache.
_BLOCK = 1 << 18


def quantize(
    weight: ArrayLike,
    *,
    bits: int | None = None,
    format: str | None = None,
    group_size: GroupSize = "default",
    symmetric: bool = False,
    method: str = "mse",
    importance: ArrayLike | None = None,
    in_axis: int = -1,
    scale_dtype: DTypeLike | None = None,
) -> QuantizedTensor:
    """Rounds a float weight to b-bit integers with a scale and a zero for each group, or to a format with a name.

    - weight: (..., N, K), or with `in_axis` saying which axis is K: `in_axis=0` for a Flax (in, out) kernel.
    - bits: 1 to 8; 4 by default.
    - group_size: codes along K that share a scale: scale (..., N, ceil(K / g)). None: one per row, scale (..., N).
      128 by default.
    - format: "nf4", "fp4", "mxfp4", "nvfp4", "iq4_nl", "fp8" or "mxfp8" decides bits and group size, and of scales of
      one byte the dtype (docs/format.md). Those of 4 bits have a codebook of `jaxgemv.codebooks`. For "fp8", whose
      group_size may be given (None by default), and "mxfp8", `packed` is float8_e4m3fn (..., N, K). "nvfp4" has a
      global_scale, the largest magnitude / (448 * 6), one for each entry of a stack.
    - symmetric: no zero array, the middle code is 0. Not with a format, none of which has a zero.
    - method: "mse" looks for the scale, and the fractional zero, with the least squared error in each group; "minmax"
      takes the whole range of the group, with an integer zero, the code of 0.0, and for "mxfp4", "mxfp8" and
      "nvfp4" gives MLX's bytes. No group comes out worse by "mse".
    - importance: float (K,), finite and >= 0, the mean square of each input, say: weights the squared error of "mse".
    - scale_dtype: float16, bfloat16 or float32, also of zero; the weight's dtype by default.

    With bits=1 a group becomes plus and minus its mean magnitude (zero = 0.5), by either method. A group with NaN or
    infinity becomes NaN. Works under `jit` and `jax.eval_shape`, in at most two float32 copies of the weight. Raises
    TypeError for dtypes, ValueError for shapes and values.

    >>> import jax, jaxgemv
    >>> weight = jax.random.normal(jax.random.key(0), (64, 256))
    >>> w = jaxgemv.quantize(weight, bits=4, group_size=64)
    >>> w.shape, w.scale.shape, weight.nbytes / w.nbytes
    ((64, 256), (64, 4), 6.4)
    >>> w = jaxgemv.quantize(weight.T, format="nvfp4", in_axis=0)
    >>> w.shape, w.scale.shape, w.scale.dtype.name
    ((64, 256), (64, 16), 'float8_e4m3fn')
    """
    bits, group_size = resolve("quantize", format, bits, group_size)
    weight = as_array("quantize", "weight", weight)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"quantize: weight must be a float array; got {weight.dtype}")
    dtype = resolve_scale_dtype("quantize", format, scale_dtype, weight.dtype)
    if weight.ndim < 2:
        raise ValueError(f"quantize: weight must have shape (..., N, K), N and K >= 1; got {weight.shape}")
    is_axis = isinstance(in_axis, Integral) and not isinstance(in_axis, bool)
    if not is_axis or not -weight.ndim <= in_axis < weight.ndim:
        raise ValueError(f"quantize: in_axis must be an axis of weight, {weight.shape}; got {in_axis}")
    *_, n = (size for axis, size in enumerate(weight.shape) if axis != in_axis % weight.ndim)
    if 0 in (n, weight.shape[in_axis]):
        raise ValueError(f"quantize: weight must have shape (..., N, K), N and K >= 1; got {weight.shape}")
    if not isinstance(symmetric, bool | np.bool_):
        raise TypeError(f"quantize: symmetric must be True or False; got {symmetric!r}")
    if format is not None and symmetric:
        raise ValueError(f"quantize: symmetric must be False for format={format!r}; got {symmetric}")
    if method not in METHODS:
        raise ValueError(f"quantize: method must be 'mse' or 'minmax'; got {method!r}")
    if importance is not None:
        importance = _checked_importance(importance, method, weight.shape[in_axis])
    return _quantize(
        jnp.asarray(weight),
        importance,
        bits=bits,
        format=format,
        group_size=group_size,
        symmetric=bool(symmetric),
        mse=method == "mse",
        in_axis=int(in_axis),
        dtype=dtype,
    )


def _checked_importance(importance, method: str, k: int):
    importance = as_array("quantize", "importance", importance)
    if method != "mse":
        raise ValueError(f"quantize: importance must be None for method={method!r}; got an array")
    if not jnp.issubdtype(importance.dtype, jnp.floating):
        raise TypeError(f"quantize: importance must be a float array; got {importance.dtype}")
    if importance.shape != (k,):
        raise ValueError(
            f"quantize: importance must have shape ({k},), one for each input; got {importance.shape}"
        )
    if not isinstance(importance, Tracer):
        values = np.asarray(importance, np.float32)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(
                f"quantize: importance must be finite and >= 0; got {values.min()} to {values.max()}"
            )
    return jnp.asarray(importance)


@partial(jax.jit, static_argnames=("bits", "format", "group_size", "symmetric", "mse", "in_axis", "dtype"))
@any_rank
def _quantize(weight, importance, *, bits, format, group_size, symmetric, mse, in_axis, dtype):
    weight = jnp.moveaxis(weight, in_axis, -1)
    *lead, k = weight.shape
    g = min(group_size or k, k)
    short = -k % g
    if short or importance is not None:
        importance = jnp.ones(k, jnp.float32) if importance is None else importance.astype(jnp.float32)
        importance = importance * _rounding.unit(importance.max())
        importance = pad_last(importance, short).reshape(-1, g)
    of = None if format is None else FORMATS[format]
    codebook = None if of is None else of.codebook
    global_scale = _global_scale(weight, np.nanmax(of.values)) if of and of.global_scale else None

    def of_rows(weight):
        """packed, scale and zero of some rows of each matrix."""
        weight = weight.astype(jnp.float32)
        # Filled up with the last weight, which leaves the group's range as it is.
        weight = jnp.pad(weight, [(0, 0)] * len(lead) + [(0, short)], mode="edge") if short else weight
        # The barrier: sums then run over the same array, in the same order, whichever axis was K.
        groups = lax.optimization_barrier(weight.reshape(*weight.shape[:-1], weight.shape[-1] // g, g))
        zero = None
        if of is None:
            codes, scale, zero = _rounding.affine(
                groups, importance, bits=bits, symmetric=symmetric, dtype=dtype, mse=mse
            )
        else:
            codes, scale = _rounding.table(
                groups, importance, values=of.values, dtype=dtype, mse=mse, global_scale=global_scale
            )
        codes = codes.reshape(*weight.shape)[..., :k]
        if group_size is None:
            scale, zero = scale[..., 0], None if zero is None else zero[..., 0]
        packed = pack_unsigned(codes, bits) if codebook or of is None else codes
        return packed, scale, zero

    packed, scale, zero = _by_rows(of_rows, weight)
    if of is not None:
        # One-byte floats are uint8 until here: a loop that fills an array of such floats converts all of it each time.
        scale = lax.bitcast_convert_type(scale, dtype) if scale.dtype == jnp.uint8 else scale
        packed = packed if codebook else lax.bitcast_convert_type(packed, jnp.float8_e4m3fn)
    return QuantizedTensor(
        packed=packed,
        scale=scale,
        zero=zero,
        codebook=jnp.broadcast_to(of.values, (*lead[:-1], 16)) if of and codebook else None,
        global_scale=global_scale,
        **static(bits, group_size, k, is_float8=packed.dtype == jnp.float8_e4m3fn),
    )


def _by_rows(f, weight):
    """f(weight), with results (..., N, ...), some rows of (..., N, K) at a time: every nth, some of each shard."""
    *lead, n, k = weight.shape
    if known(weight.size) is None:
        return f(weight)
    blocks = min(n, -(-weight.size // _BLOCK))
    if blocks <= 1:
        return f(weight)
    at = len(lead)
    short = -n % blocks
    weight = jnp.pad(weight, [(0, 0)] * at + [(0, short), (0, 0)]) if short else weight
    rows = weight.reshape(*lead, -1, blocks, k)

    def joined(a):
        a = jnp.moveaxis(a, 0, at + 1)
        return a.reshape(*lead, -1, *a.shape[at + 2 :])[(slice(None),) * at + (slice(n),)]

    every = lax.map(
        lambda i: f(lax.dynamic_index_in_dim(rows, i, at + 1, keepdims=False)), jnp.arange(blocks)
    )
    return jax.tree.map(joined, every)


def _global_scale(weight, largest):
    """One for each matrix, so that the scale of its largest group is the largest that e4m3 has."""
    magnitude = jnp.max(jnp.abs(weight), axis=(-2, -1), where=jnp.isfinite(weight), initial=0)
    scale = magnitude.astype(jnp.float32) / np.float32(448 * largest)
    return jnp.where(scale == 0, 1, scale)


def static(bits: int, group_size: int | None, k: int, *, is_float8: bool) -> dict[str, Any]:
    """The fields of a tensor that its arrays do not tell."""
    g = min(group_size or k, k)
    return {
        "bits": bits,
        "group_size": g if k % g else None,
        "k": k if not is_float8 and k * bits % 32 else None,
    }
