"""The public operations: check, promote, bind."""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxgemv import _dispatch, _primitive
from jaxgemv._arguments import (
    Asked,
    check_eps,
    check_index,
    check_integer_product,
    check_out_dtype,
    check_parts,
    check_round_norm,
    check_x,
    known_entry,
)
from jaxgemv._check import FLOATS, as_array, as_index, check_weight
from jaxgemv._ffi import backends
from jaxgemv._operands import Operands, Static
from jaxgemv._tensor import ARRAYS, QuantizedTensor, Transposed

_STATIC = ("out_dtype", "implementation", "out_sharding")

_P = ParamSpec("_P")


def _is_local(a) -> bool:
    """Whether it is an array on one device. Of others a trace would hide the sharding, which is checked."""
    return isinstance(a, Array) and not isinstance(a, Tracer) and isinstance(a.sharding, SingleDeviceSharding)


def _are_exact(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a compiled call with equal arguments has checked these: 4.0 and True equal 4 and 1, and are refused."""
    w = args[1] if len(args) > 1 else kwargs.get("w")
    ints = (w.bits, w.group_size, w.k) if isinstance(w, QuantizedTensor) else (kwargs.get("group_size"),)
    is_bool = isinstance(kwargs.get("round_norm", False), bool)
    return is_bool and all(i is None or type(i) is int for i in ints)


def _checked_once(function: Callable[_P, Array], more: tuple[str, ...] = ()) -> Callable[_P, Array]:
    """Outside a trace, where checks take longer than a small product, they run once for all calls that are alike."""
    static = (*_STATIC, *more)
    traced = jax.jit(function, static_argnames=static)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Array:
        arrays = jax.tree.leaves((args, [value for name, value in kwargs.items() if name not in static]))
        alike = all(isinstance(kwargs.get(name), Hashable) for name in static) and _are_exact(args, kwargs)
        return (traced if alike and all(map(_is_local, arrays)) else function)(*args, **kwargs)

    return call


@partial(_checked_once, more=("activation", "eps", "round_norm"))
def gemv(
    x: ArrayLike,
    w: QuantizedTensor | ArrayLike,
    *,
    index: ArrayLike | None = None,
    norm: ArrayLike | None = None,
    eps: float = 1e-5,
    round_norm: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    x_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    implementation: str | None = None,
) -> Array:
    """x (..., K) times the rows of w (N, K), accumulated in float32: (..., N).

    - x: float16, bfloat16 or float32, any rank >= 1; int8 for integer products.
    - w: a `QuantizedTensor`, or a dense float array (N, K).
    - index: integers, for w with a leading stack dimension (S, N, K): which entry each slice of x meets, a scalar
      (a layer), one per row of x (an expert), or any leading part of x's shape. Out of range gives NaN, and so does a
      negative one. A Python number inside `jax.jit` is free: no kernel reads it.
    - norm: float (K,); x becomes `x * rsqrt(mean(x^2) + eps) * norm` first (RMSNorm), in float32. With index also
      (S, K).
    - round_norm: whether that may be rounded to x's dtype before it meets w, as models do that norm x by themselves.
      With several rows of 16-bit x it is faster on a GPU.
    - bias: float (N,), added in float32. With index also (S, N).
    - activation: "relu", "silu", "gelu" (by tanh) or "gelu_exact" of the sum; or "swiglu", "geglu" for a w of 2 F rows:
      `silu(y[..., :F]) * y[..., F:]`, or gelu, (..., F).
    - residual: float, of the result's shape, added last. The result is rounded once.
    - x_scale: float32, only for int8 x: (), or (..., G) for G groups of x along K, 1 for one scale a row. The result is
      that of `x * x_scale`. See `jaxgemv.quantize_activations`.
    - out_dtype: float16, bfloat16 or float32; x's dtype by default. For int8 x, float32, or int32 when w.scale is
      None, which gives the exact sum of x * (q - zero).
    - out_sharding: of the result, on a mesh with Explicit axes; by default that of x's leading dimensions and of N.
    - implementation: None for the best one of the platform that is compiled for; "cuda", "cpu" or "xla" by name,
      and then a missing one is an error.

    Where more than 64 rows of x meet one matrix, its weights may be rounded once to the dtype of 16-bit x, and float32
    x follows `jax.default_matmul_precision`. Up to 64, all is in float32, but beside 16-bit x a codebook's entries
    are within 2^-14 of the largest on a GPU, and weights within 2^-17 of themselves on a CPU with AMX.

    Raises TypeError for dtypes, ValueError for shapes and values, while tracing; NotImplementedError for a combination
    that the named implementation lacks, while tracing or lowering.

    >>> import jax.numpy as jnp, jaxgemv
    >>> codes = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    >>> w = jaxgemv.QuantizedTensor.from_codes(codes, jnp.ones(2), zero=jnp.zeros(2), bits=4)
    >>> x = jnp.array([1.0, 0.0, 0.0, 2.0])
    >>> jaxgemv.gemv(x, w)
    Array([ 9., 21.], dtype=float32)
    >>> jaxgemv.gemv(x, w, bias=jnp.array([-10.0, 0.0]), activation="relu", residual=jnp.ones(2))
    Array([ 1., 22.], dtype=float32)
    >>> jaxgemv.gemv(jnp.ones((5, 3, 4)), w, out_dtype=jnp.bfloat16).shape
    (5, 3, 2)
    """
    asked = Asked(
        index, norm, eps, round_norm, bias, activation, residual, x_scale, out_dtype, implementation
    )
    if isinstance(w, QuantizedTensor):
        return _gemv("gemv", x, w, asked, out_sharding, prefix="w.")
    return _dense("gemv", x, w, asked, out_sharding)


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
        asked = Asked(bias=bias, out_dtype=out_dtype, implementation=implementation)
        return _gemv(op, x, w, asked, out_sharding)

    gemv_bits.__name__ = gemv_bits.__qualname__ = op
    gemv_bits.__doc__ = f"""x (..., K) times a weight (N, K) of {bits}-bit codes: (..., N), in x's dtype.

    `y[..., n] = sum_k x[..., k] * (q[n, k] - zero[n, k // g]) * scale[n, k // g]`, accumulated in float32.

    - Wq: uint32 (N, ceil({bits} K / 32)), as `jaxgemv.pack` makes it, or uint8 with the same bytes.
    - zero, scale: float16, bfloat16 or float32 of shape (), (N,) or (N, G), g = K / G; zero may also be an integer
      array, and None means the mid code {1 << bits - 1}. group_size: needed when G does not divide K.
    - x, bias, out_dtype, out_sharding, implementation and errors: as in `jaxgemv.gemv`.

    >>> import jax.numpy as jnp, jaxgemv
    >>> Wq = jaxgemv.pack(jnp.array([[1, 0, 1, 1]]), {bits})
    >>> jaxgemv.{op}(jnp.array([1.0, 2.0, 3.0, 4.0]), Wq, jnp.zeros(1), jnp.ones(1))
    Array([8.], dtype=float32)
    """
    return _checked_once(gemv_bits, more=("group_size",))


gemv_int1, gemv_int2, gemv_int3, gemv_int4, gemv_int5, gemv_int6, gemv_int7, gemv_int8 = map(
    _public, range(1, 9)
)


def _gemv(op: str, x, w: QuantizedTensor, asked: Asked, out_sharding, prefix: str = "") -> Array:
    name = f"{prefix}packed" if prefix else "Wq"
    w = _with_arrays(op, w, name)
    integer = w.scale is None
    x = check_x(op, x, (*FLOATS, jnp.int8))
    if integer and x.dtype != jnp.int8:
        raise TypeError(f"{op}: scale must be an array for x of dtype {x.dtype}; got None")
    k = x.shape[-1]
    group = check_weight(op, w, k, prefix, f" for x with K = {k}")
    # Packed words alone do not tell K: x's width says how many codes the last word holds.
    whole = w.shape[-1] if prefix else w.k or k
    if k != whole:
        raise ValueError(f"{op}: x must have shape (..., {whole}) for w of shape {w.shape}; got {x.shape}")
    if integer:
        check_integer_product(op, w, asked)
        out = check_out_dtype(op, asked.out_dtype, (jnp.int32,), jnp.int32)
    else:
        out = check_out_dtype(op, asked.out_dtype, FLOATS, x.dtype if x.dtype in FLOATS else jnp.float32)
    if w.perm is not None:
        w = dataclasses.replace(w, perm=as_index(op, w.perm, k))
    arrays = {field: jnp.asarray(a) for field in ARRAYS if (a := getattr(w, field)) is not None}
    if w.zero is not None and not integer:
        arrays["zero"] = _float_zero(arrays["zero"], w.dtype)
    static = Static(op, w.bits, group, out)
    return _product(_primitive.product, x, arrays, asked, static, out_sharding, name)


def _dense(op: str, x, w, asked: Asked, out_sharding) -> Array:
    x = check_x(op, x, FLOATS)
    if isinstance(w, Transposed):
        raise TypeError(
            f"{op}: w must be a QuantizedTensor or a float array; got its w.T: give w, or write x @ w.T"
        )
    w = None if w is None else as_array(op, "w", w)
    if w is None or w.dtype not in FLOATS:
        got = None if w is None else w.dtype
        raise TypeError(f"{op}: w must be a QuantizedTensor or a float array; got {got}")
    k = x.shape[-1]
    if w.ndim < 2 or w.shape[-1] != k or w.shape[-2] == 0:
        raise ValueError(f"{op}: w must have shape (N, {k}) for x with K = {k}; got {tuple(w.shape)}")
    static = Static(op, 0, None, check_out_dtype(op, asked.out_dtype, FLOATS, x.dtype))
    arrays = {"packed": jnp.asarray(w)}
    return _product(_primitive.dense_product, x, arrays, asked, static, out_sharding, "w")


def _product(
    product, x: Array, weight: dict[str, Array], asked: Asked, s: Static, out_sharding, name: str
) -> Array:
    """What products of both kinds share: all other arguments. name: what messages call weight["packed"]."""
    shape = tuple(weight["packed"].shape)
    index = check_index(s.op, asked.index, x, name, shape)
    parts = check_parts(s.op, asked, x, shape, index, name)
    o = Operands(x=x, **weight, index=index, **parts)
    s = s._replace(
        activation=asked.activation,
        eps=check_eps(s.op, asked.eps),
        round_norm=check_round_norm(s.op, asked.round_norm) and "norm" in parts,
        entry=known_entry(asked.index, x, shape),
        implementation=asked.implementation,
        precision=jax.config.jax_default_matmul_precision,  # which may be another one when this is lowered
    )
    _check_implementation(o, s)
    with jax.named_scope(f"jaxgemv.{s.op}"):
        return product(o, s, out_sharding)


def _with_arrays(op: str, w: QuantizedTensor, name: str) -> QuantizedTensor:
    """w with arrays as leaves, which may have been Python numbers, say."""
    fields = {field: getattr(w, field) for field in ARRAYS}
    arrays = {
        field: as_array(op, name if field == "packed" else field, a)
        for field, a in fields.items()
        if a is not None or field == "packed"
    }
    return QuantizedTensor(**{**fields, **arrays}, bits=w.bits, group_size=w.group_size, k=w.k)


def _check_implementation(o: Operands, s: Static) -> None:
    """Raises now, while tracing, for a named backend that has no kernel; lowering sees whether there is a device."""
    if s.implementation in (None, "xla", "reference"):
        return
    if not isinstance(s.implementation, str) or s.implementation not in backends:
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
