"""The public operations: check, promote, bind."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxgemv import _sharding
from jaxgemv._check import FLOATS, as_array, check_weight
from jaxgemv._ffi import backends
from jaxgemv._format import QuantizedTensor
from jaxgemv._primitive import why_no_kernel

_ARRAYS = ("packed", "scale", "zero", "offset", "codebook")
_STATIC = ("out_dtype", "implementation", "out_sharding")


_P = ParamSpec("_P")


def _is_local(a) -> bool:
    """An array on one device: where shardings are known, a trace must not hide them."""
    return isinstance(a, Array) and not isinstance(a, Tracer) and isinstance(a.sharding, SingleDeviceSharding)


def _checked_once(function: Callable[_P, Array], static: tuple[str, ...] = _STATIC) -> Callable[_P, Array]:
    """Outside a trace, where checks take longer than a small product, they run once for all calls that are alike."""
    traced = jax.jit(function, static_argnames=static)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Array:
        arrays = jax.tree.leaves((args, [value for name, value in kwargs.items() if name not in static]))
        alike = all(isinstance(kwargs.get(name), Hashable) for name in static)
        return (traced if alike and all(map(_is_local, arrays)) else function)(*args, **kwargs)

    return call


@_checked_once
def gemv(
    x: ArrayLike,
    w: QuantizedTensor | ArrayLike,
    *,
    index: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """x (..., K) times the rows of w (N, K), accumulated in float32: (..., N).

    - x: float16, bfloat16 or float32, any rank >= 1; int8 for integer products.
    - w: a `QuantizedTensor`, or a dense float array (N, K).
    - index: int32, for w with a leading stack dimension (S, N, K): which entry each slice of x meets, a scalar
      (a layer), one per row of x (an expert), or any leading part of x's shape. Out of range gives NaN.
    - bias: float (N,), added in float32 before the result is rounded; with index also (S, N).
    - out_dtype: float16, bfloat16 or float32; x's dtype by default. For int8 x, float32, or int32 when w.scale is
      None, which gives the exact sum of x * (q - zero).
    - implementation: None for the best one of the platform that is compiled for; "cuda", "cpu" or "xla" by name,
      and then a missing one is an error.
    - out_sharding: of the result, on a mesh with Explicit axes; by default that of x's leading dimensions and of N.

    Raises TypeError for dtypes, ValueError for shapes and values, NotImplementedError for a combination that the
    named implementation lacks; all while tracing.
    """
    if isinstance(w, QuantizedTensor):
        return _gemv("gemv", x, w, index, bias, out_dtype, implementation, out_sharding, prefix="w.")
    return _dense("gemv", x, w, index, bias, out_dtype, implementation, out_sharding)


def _public(bits: int):
    op = f"gemv_int{bits}"

    def gemv_bits(
        x: ArrayLike,
        Wq: ArrayLike,
        zero: ArrayLike | None,
        scale: ArrayLike | None,
        *,
        bias: ArrayLike | None = None,
        group_size: int | None = None,
        out_dtype: DTypeLike | None = None,
        implementation: str | None = None,
        out_sharding: NamedSharding | PartitionSpec | None = None,
    ) -> Array:
        if Wq is None:
            raise TypeError(f"{op}: Wq must be an array; got None")
        w = QuantizedTensor(
            packed=as_array(op, "packed", Wq),
            scale=None if scale is None else as_array(op, "scale", scale),
            zero=None if zero is None else as_array(op, "zero", zero),
            bits=bits,
            group_size=group_size,
        )
        return _gemv(op, x, w, None, bias, out_dtype, implementation, out_sharding)

    gemv_bits.__name__ = gemv_bits.__qualname__ = op
    gemv_bits.__doc__ = f"""x (..., K) times a weight (N, K) of {bits}-bit codes: (..., N), in x's dtype.

    `y[..., n] = sum_k x[..., k] * (q[n, k] - zero[n, k // g]) * scale[n, k // g]`, accumulated in float32.

    - Wq: uint32 (N, ceil({bits} K / 32)), as `jaxgemv.pack` makes it, or uint8 with the same bytes.
    - zero, scale: float16, bfloat16 or float32 of shape (), (N,) or (N, G), g = K / G; zero may also be an integer
      array, and None means the mid code {1 << bits - 1}. group_size: needed when G does not divide K.
    - x, bias, out_dtype, implementation, out_sharding and errors: as in `jaxgemv.gemv`.
    """
    return _checked_once(gemv_bits, ("group_size", *_STATIC))


gemv_int1, gemv_int2, gemv_int3, gemv_int4, gemv_int5, gemv_int6, gemv_int7, gemv_int8 = map(
    _public, range(1, 9)
)


def _check_x(op: str, x, dtypes) -> Array:
    x = as_array(op, "x", x)
    if x.dtype not in dtypes:
        names = ", ".join(jnp.dtype(d).name for d in dtypes)
        raise TypeError(f"{op}: x must be one of {names}; got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must have shape (..., K) with K >= 1; got {tuple(x.shape)}")
    return jnp.asarray(x)


def _check_out_dtype(op: str, out_dtype, allowed, default):
    if out_dtype is None:
        return jnp.dtype(default)
    dtype = jnp.dtype(out_dtype)
    if dtype not in allowed:
        names = ", ".join(jnp.dtype(d).name for d in allowed)
        raise TypeError(f"{op}: out_dtype must be one of {names}; got {dtype}")
    return dtype


def _check_bias(op: str, bias, n: int, stack: int | None):
    bias = as_array(op, "bias", bias)
    if bias.dtype not in FLOATS:
        raise TypeError(f"{op}: bias must be float16, bfloat16 or float32; got {bias.dtype}")
    if bias.shape != (n,) and (stack is None or bias.shape != (stack, n)):
        either = "" if stack is None else f" or ({stack}, {n})"
        raise ValueError(f"{op}: bias must have shape ({n},){either}; got {tuple(bias.shape)}")
    bias = jnp.asarray(bias)
    return bias[None] if stack is not None and bias.ndim == 1 else bias


def _check_index(op: str, index, x: Array, name: str, shape: tuple[int, ...]):
    """index as int32, or None for a weight that is no stack."""
    stack = shape[:-2]
    if index is None:
        if stack:
            raise ValueError(
                f"{op}: {name} must have shape (N, ...), or be a stack with index= or under jax.vmap; got {shape}"
            )
        return None
    index = as_array(op, "index", index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{op}: index must be int32; got {index.dtype}")
    if len(stack) != 1:
        raise ValueError(f"{op}: with index, {name} must have one stack dimension, (S, N, ...); got {shape}")
    if tuple(index.shape) != tuple(x.shape[: index.ndim]) or index.ndim >= x.ndim:
        raise ValueError(
            f"{op}: index must be a scalar or have the leading dimensions of x, {tuple(x.shape[:-1])}; "
            f"got {tuple(index.shape)}"
        )
    return jnp.asarray(index).astype(jnp.int32)


def _check_implementation(op: str, implementation, named: dict | None, bits: int):
    """Raises now, while tracing, for a named backend that cannot run; lowering has the last word."""
    if implementation in (None, "xla"):
        return
    if implementation not in backends:
        raise ValueError(f"{op}: implementation must be None, 'cuda', 'cpu' or 'xla'; got {implementation!r}")
    if named is None:
        reason = f"the {implementation} backend has no kernel for dense weights"
    else:
        reason = why_no_kernel(implementation, named, bits)
    if not reason and implementation == "cuda" and not _has_gpu():
        reason = "JAX sees no CUDA device"
    if reason:
        raise NotImplementedError(f"{op}: implementation={implementation!r} cannot run: {reason}")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _float_zero(zero: Array, scale_dtype) -> Array:
    """An integer zero in a float dtype that holds it exactly."""
    if not jnp.issubdtype(zero.dtype, jnp.integer):
        return zero
    return zero.astype(scale_dtype if zero.dtype.itemsize == 1 else jnp.float32)


def _gemv(op, x, w, index, bias, out_dtype, implementation, out_sharding, prefix=""):
    named = {name: getattr(w, name) for name in _ARRAYS if getattr(w, name) is not None}
    integer = "scale" not in named
    x = _check_x(op, x, (*FLOATS, jnp.int8))
    if integer and x.dtype != jnp.int8:
        raise TypeError(f"{op}: scale must be an array for x of dtype {x.dtype}; got None")
    k = x.shape[-1]
    group = check_weight(op, w, k, prefix, f" for x with K = {k}")
    if w.k is not None and w.k != k:
        raise ValueError(f"{op}: x must have shape (..., {w.k}) for w of shape {w.shape}; got {x.shape}")
    if integer:
        if "zero" in named and not jnp.issubdtype(named["zero"].dtype, jnp.integer):
            raise TypeError(
                f"{op}: zero must be an integer array when scale is None; got {named['zero'].dtype}"
            )
        if named.keys() - {"packed", "zero"} or bias is not None:
            raise ValueError(f"{op}: offset, codebook and bias need scale; got scale=None")
        out = _check_out_dtype(op, out_dtype, (jnp.int32,), jnp.int32)
    else:
        out = _check_out_dtype(op, out_dtype, FLOATS, x.dtype if x.dtype in FLOATS else jnp.float32)
    name = f"{prefix}packed" if prefix else "Wq"
    index = _check_index(op, index, x, name, tuple(w.packed.shape))
    named = {field: jnp.asarray(a) for field, a in named.items()}
    if "zero" in named and not integer:
        named["zero"] = _float_zero(named["zero"], named["scale"].dtype)
    stack = None if index is None else w.packed.shape[0]
    if index is not None and "codebook" in named and named["codebook"].ndim == 1:
        named["codebook"] = named["codebook"][None]
    named = {"x": x, **named}
    if bias is not None:
        named["bias"] = _check_bias(op, bias, w.packed.shape[-2], stack)
    if index is not None:
        named["index"] = index
    _check_implementation(op, implementation, named, w.bits)
    with jax.named_scope(f"jaxgemv.{op}"):
        return _sharding.product(
            named,
            op=op,
            bits=w.bits,
            group=group,
            out_dtype=out,
            implementation=implementation,
            out_sharding=out_sharding,
        )


def _dense(op, x, w, index, bias, out_dtype, implementation, out_sharding):
    x = _check_x(op, x, FLOATS)
    w = as_array(op, "w", w)
    if w.dtype not in FLOATS:
        raise TypeError(f"{op}: w must be a QuantizedTensor or a float array; got {w.dtype}")
    k = x.shape[-1]
    if w.ndim < 2 or w.shape[-1] != k or w.shape[-2] == 0:
        raise ValueError(f"{op}: w must have shape (N, {k}) for x with K = {k}; got {tuple(w.shape)}")
    index = _check_index(op, index, x, "w", tuple(w.shape))
    named = {"x": x, "w": jnp.asarray(w)}
    if bias is not None:
        named["bias"] = _check_bias(op, bias, w.shape[-2], None if index is None else w.shape[0])
    if index is not None:
        named["index"] = index
    _check_implementation(op, implementation, None, 0)
    out = _check_out_dtype(op, out_dtype, FLOATS, x.dtype)
    with jax.named_scope(f"jaxgemv.{op}"):
        return _sharding.dense_product(named, op=op, out_dtype=out, out_sharding=out_sharding)
