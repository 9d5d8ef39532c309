"""The public operations: check, promote, bind."""

from collections.abc import Callable, Hashable
from functools import partial, wraps
from numbers import Real
from typing import ParamSpec

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxgemv import _around, _dispatch, _primitive
from jaxgemv._check import FLOATS, as_array, as_index, check_float, check_weight, names_of
from jaxgemv._ffi import backends
from jaxgemv._operands import Operands, Static
from jaxgemv._tensor import ARRAYS, QuantizedTensor, Transposed

_STATIC = ("out_dtype", "implementation", "out_sharding")

_P = ParamSpec("_P")


def _is_local(a) -> bool:
    """An array on one device: where shardings are known, a trace must not hide them."""
    return isinstance(a, Array) and not isinstance(a, Tracer) and isinstance(a.sharding, SingleDeviceSharding)


def _checked_once(function: Callable[_P, Array], more: tuple[str, ...] = ()) -> Callable[_P, Array]:
    """Outside a trace, where checks take longer than a small product, they run once for all calls that are alike."""
    static = (*_STATIC, *more)
    traced = jax.jit(function, static_argnames=static)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Array:
        arrays = jax.tree.leaves((args, [value for name, value in kwargs.items() if name not in static]))
        alike = all(isinstance(kwargs.get(name), Hashable) for name in static)
        return (traced if alike and all(map(_is_local, arrays)) else function)(*args, **kwargs)

    return call


@partial(_checked_once, more=("activation", "eps"))
def gemv(
    x: ArrayLike,
    w: QuantizedTensor | ArrayLike,
    *,
    index: ArrayLike | None = None,
    norm: ArrayLike | None = None,
    eps: float = 1e-5,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str | None = None,
) -> Array:
    """x (..., K) times the rows of w (N, K), accumulated in float32: (..., N).

    - x: float16, bfloat16 or float32, any rank >= 1; int8 for integer products.
    - w: a `QuantizedTensor`, or a dense float array (N, K).
    - index: integers, for w with a leading stack dimension (S, N, K): which entry each slice of x meets, a scalar
      (a layer), one per row of x (an expert), or any leading part of x's shape. Out of range gives NaN.
    - norm: float (K,); x becomes `x * rsqrt(mean(x^2) + eps) * norm` first (RMSNorm), in float32. With index also
      (S, K).
    - bias: float (N,), added in float32. With index also (S, N).
    - activation: "relu", "silu", "gelu" (by tanh) or "gelu_exact" of the sum; or "swiglu", "geglu" for a w of 2 F rows:
      `silu(y[..., :F]) * y[..., F:]`, or gelu, (..., F).
    - residual: float, of the result's shape, added last. The result is rounded once.
    - out_dtype: float16, bfloat16 or float32; x's dtype by default. For int8 x, float32, or int32 when w.scale is
      None, which gives the exact sum of x * (q - zero).
    - out_sharding: of the result, on a mesh with Explicit axes; by default that of x's leading dimensions and of N.
    - implementation: None for the best one of the platform that is compiled for; "cuda", "cpu" or "xla" by name,
      and then a missing one is an error.

    Raises TypeError for dtypes, ValueError for shapes and values, while tracing; NotImplementedError for a combination
    that the named implementation lacks, while tracing or lowering.
    """
    parts = {"norm": norm, "bias": bias, "residual": residual}
    static = Static("gemv", 0, None, out_dtype, implementation, activation=activation, eps=eps)  # pyright: ignore[reportArgumentType]
    if isinstance(w, QuantizedTensor):
        return _gemv(x, w, index, parts, static, out_sharding, prefix="w.")
    return _dense(x, w, index, parts, static, out_sharding)


Transposed.gemv = staticmethod(gemv)


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
        out_sharding: NamedSharding | PartitionSpec | None = None,
        implementation: str | None = None,
    ) -> Array:
        w = QuantizedTensor(packed=Wq, scale=scale, zero=zero, bits=bits, group_size=group_size)  # pyright: ignore[reportArgumentType]
        static = Static(op, 0, None, out_dtype, implementation)  # pyright: ignore[reportArgumentType]
        return _gemv(x, w, None, {"bias": bias}, static, out_sharding)

    gemv_bits.__name__ = gemv_bits.__qualname__ = op
    gemv_bits.__doc__ = f"""x (..., K) times a weight (N, K) of {bits}-bit codes: (..., N), in x's dtype.

    `y[..., n] = sum_k x[..., k] * (q[n, k] - zero[n, k // g]) * scale[n, k // g]`, accumulated in float32.

    - Wq: uint32 (N, ceil({bits} K / 32)), as `jaxgemv.pack` makes it, or uint8 with the same bytes.
    - zero, scale: float16, bfloat16 or float32 of shape (), (N,) or (N, G), g = K / G; zero may also be an integer
      array, and None means the mid code {1 << bits - 1}. group_size: needed when G does not divide K.
    - x, bias, out_dtype, out_sharding, implementation and errors: as in `jaxgemv.gemv`.
    """
    return _checked_once(gemv_bits, more=("group_size",))


gemv_int1, gemv_int2, gemv_int3, gemv_int4, gemv_int5, gemv_int6, gemv_int7, gemv_int8 = map(
    _public, range(1, 9)
)


def _gemv(x, w: QuantizedTensor, index, parts: dict, s: Static, out_sharding, prefix: str = "") -> Array:
    op, name = s.op, f"{prefix}packed" if prefix else "Wq"
    w = _with_arrays(op, w, name)
    integer = w.scale is None
    x = _check_x(op, x, (*FLOATS, jnp.int8))
    if integer and x.dtype != jnp.int8:
        raise TypeError(f"{op}: scale must be an array for x of dtype {x.dtype}; got None")
    k = x.shape[-1]
    group = check_weight(op, w, k, prefix, f" for x with K = {k}")
    if w.k is not None and w.k != k:
        raise ValueError(f"{op}: x must have shape (..., {w.k}) for w of shape {w.shape}; got {x.shape}")
    if integer:
        _check_integer_product(w, parts, s)
        out = _check_out_dtype(op, s.out_dtype, (jnp.int32,), jnp.int32)
    else:
        out = _check_out_dtype(op, s.out_dtype, FLOATS, x.dtype if x.dtype in FLOATS else jnp.float32)
    shape = tuple(w.packed.shape)
    index = _check_index(op, index, x, name, shape)
    arrays = {name: jnp.asarray(a) for name in ARRAYS if (a := getattr(w, name)) is not None}
    if w.zero is not None and not integer:
        arrays["zero"] = _float_zero(arrays["zero"], w.dtype)
    s = s._replace(bits=w.bits, group=group, out_dtype=out, eps=_check_eps(s))
    o = Operands(x=x, **arrays, index=index, **_check_parts(parts, x, shape, index, s, name))
    _check_implementation(o, s)
    with jax.named_scope(f"jaxgemv.{op}"):
        return _primitive.product(o, s, out_sharding)


def _dense(x, w, index, parts: dict, s: Static, out_sharding) -> Array:
    op = s.op
    x = _check_x(op, x, FLOATS)
    if w is None:
        raise TypeError(f"{op}: w must be a QuantizedTensor or a float array; got None")
    w = as_array(op, "w", w)
    if w.dtype not in FLOATS:
        raise TypeError(f"{op}: w must be a QuantizedTensor or a float array; got {w.dtype}")
    k, shape = x.shape[-1], tuple(w.shape)
    if w.ndim < 2 or w.shape[-1] != k or w.shape[-2] == 0:
        raise ValueError(f"{op}: w must have shape (N, {k}) for x with K = {k}; got {shape}")
    index = _check_index(op, index, x, "w", shape)
    out = _check_out_dtype(op, s.out_dtype, FLOATS, x.dtype)
    s = s._replace(out_dtype=out, eps=_check_eps(s))
    o = Operands(x=x, packed=jnp.asarray(w), index=index, **_check_parts(parts, x, shape, index, s, "w"))
    _check_implementation(o, s)
    with jax.named_scope(f"jaxgemv.{op}"):
        return _primitive.dense_product(o, s, out_sharding)


def _with_arrays(op: str, w: QuantizedTensor, name: str) -> QuantizedTensor:
    """Leaves as arrays, if they were Python numbers, say."""
    fields = {field: getattr(w, field) for field in ARRAYS}
    arrays = {
        field: as_array(op, name if field == "packed" else field, a)
        for field, a in fields.items()
        if a is not None or field == "packed"
    }
    return QuantizedTensor(**{**fields, **arrays}, bits=w.bits, group_size=w.group_size, k=w.k)


def _check_x(op: str, x, dtypes) -> Array:
    x = as_array(op, "x", x)
    if x.dtype not in dtypes:
        raise TypeError(
            f"{op}: x must be one of {', '.join(jnp.dtype(d).name for d in dtypes)}; got {x.dtype}"
        )
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


def _check_eps(s: Static) -> float:
    if not isinstance(s.eps, Real) or not 0 <= s.eps < float("inf"):
        raise ValueError(f"{s.op}: eps must be a number, 0 or more; got {s.eps!r}")
    return float(s.eps)


def _check_integer_product(w: QuantizedTensor, parts: dict, s: Static) -> None:
    if w.zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer):
        raise TypeError(f"{s.op}: zero must be an integer array when scale is None; got {w.zero.dtype}")
    if w.offset is not None or w.codebook is not None or parts["bias"] is not None:
        raise ValueError(f"{s.op}: offset, codebook and bias need scale; got scale=None")
    if s.activation or parts.get("residual") is not None or w.global_scale is not None:
        raise ValueError(f"{s.op}: activation, residual and global_scale need scale; got scale=None")


def _check_parts(parts: dict, x: Array, shape, index, s: Static, name: str) -> dict[str, Array]:
    """norm, bias and residual, those that are given, as Operands takes them. shape: of the weight or its words."""
    op, n, k = s.op, shape[-2], x.shape[-1]
    known = (*_around.ACTIVATIONS, *_around.GATED)
    if s.activation is not None and s.activation not in known:
        raise ValueError(f"{op}: activation must be None or one of {', '.join(known)}; got {s.activation!r}")
    gated = _around.is_gated(s.activation)
    if gated and n % 2:
        raise ValueError(f"{op}: {name} must have an even number of rows for {s.activation}; got {shape}")
    stack = None if index is None else shape[0]
    checked = {}
    for part, width in (("norm", k), ("bias", n)):
        if parts.get(part) is not None:
            checked[part] = _check_vector(op, part, parts[part], width, stack)
    if "norm" in checked and x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be {names_of(FLOATS)} for norm; got {x.dtype}")
    if parts.get("residual") is not None:
        residual = check_float(op, "residual", parts["residual"])
        expected = (*x.shape[:-1], n // 2 if gated else n)
        if tuple(residual.shape) != expected:
            raise ValueError(
                f"{op}: residual must have the result's shape, {expected}; got {tuple(residual.shape)}"
            )
        checked["residual"] = jnp.asarray(residual)
    return checked


def _check_vector(op: str, name: str, a, width: int, stack: int | None) -> Array:
    a = check_float(op, name, a)
    if a.shape != (width,) and (stack is None or a.shape != (stack, width)):
        either = "" if stack is None else f" or ({stack}, {width})"
        raise ValueError(f"{op}: {name} must have shape ({width},){either}; got {tuple(a.shape)}")
    a = jnp.asarray(a)
    return a[None] if stack is not None and a.ndim == 1 else a


def _check_index(op: str, index, x: Array, name: str, shape: tuple[int, ...]) -> Array | None:
    """index as int32, or None for a weight that is no stack."""
    stack = shape[:-2]
    if index is None:
        if stack:
            raise ValueError(
                f"{op}: {name} must have shape (N, ...), or be a stack with index= or under jax.vmap; got {shape}"
            )
        return None
    if len(stack) != 1:
        raise ValueError(f"{op}: with index, {name} must have one stack dimension, (S, N, ...); got {shape}")
    index = as_index(op, index, stack[0])
    if tuple(index.shape) != tuple(x.shape[: index.ndim]) or index.ndim >= x.ndim:
        raise ValueError(
            f"{op}: index must be a scalar or have the leading dimensions of x, {tuple(x.shape[:-1])}; "
            f"got {tuple(index.shape)}"
        )
    return jnp.asarray(index)


def _check_implementation(o: Operands, s: Static) -> None:
    """Raises now, while tracing, for a named backend that has no kernel; whether there is a device, lowering knows."""
    if s.implementation in (None, "xla"):
        return
    if s.implementation not in backends:
        raise ValueError(
            f"{s.op}: implementation must be None, 'cuda', 'cpu' or 'xla'; got {s.implementation!r}"
        )
    if s.bits == 0:
        reason = f"the {s.implementation} backend has no kernel for dense weights"
    else:
        reason = _dispatch.why_no_kernel(s.implementation, o, s)
    if reason:
        raise NotImplementedError(f"{s.op}: implementation={s.implementation!r} cannot run: {reason}")


def _float_zero(zero: Array, scale_dtype) -> Array:
    """An integer zero in a float dtype that holds it exactly."""
    if not jnp.issubdtype(zero.dtype, jnp.integer):
        return zero
    return zero.astype(scale_dtype if zero.dtype.itemsize == 1 else jnp.float32)
