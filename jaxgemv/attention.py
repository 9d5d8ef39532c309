"""Attention of one token, which is what lies between the products of a decoder."""

import functools
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxgemv._check import FLOATS, as_array, names_of
from jaxgemv._ffi import ATTEND, backends

_OP = "attention.one_token"


def one_token(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    position: ArrayLike,
    *,
    window: int = 0,
    scale: float | None = None,
) -> Array:
    """Attention of the one token at `position` to the keys and values in a cache.

    A kernel on a CPU, which reads the positions that are seen, and each once; plain JAX elsewhere, where XLA or a
    kernel of your own does as well. To be vmapped over sequences; differentiable, in plain JAX.

    - q: (heads, D), float16, bfloat16 or float32.
    - k, v: (kv_heads, S, D), in q's dtype; heads is a multiple of kv_heads, and neighbours share keys.
    - position: int32 (): the token sees positions 0 ... position of the cache, its own among them.
    - window: how many of the last positions the token sees; 0 for all. Known while tracing, as scale is.
    - scale: of scores; 1 / sqrt(D) if None.

    Gives (heads, D) in q's dtype; scores, weights and sums are float32. NaN where no position is seen. Raises TypeError
    for dtypes, ValueError for shapes and a negative window.

    >>> import jax.numpy as jnp
    >>> from jaxgemv import attention
    >>> cache = jnp.ones((2, 16, 64))
    >>> attention.one_token(jnp.ones((8, 64)), cache, cache, 3).shape
    (8, 64)
    """
    given = {"q": q, "k": k, "v": v, "position": position}
    q, k, v, position = (jnp.asarray(as_array(_OP, name, a)) for name, a in given.items())
    _check(q, k, v, position)
    scale = _checked_scale(q.shape[-1] ** -0.5 if scale is None else scale)
    return _one_token(q, k, v, position.astype(jnp.int32), _checked_window(window), scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _one_token(q, k, v, position, window, scale):
    plain = functools.partial(_plain, window=window, scale=scale)
    if backends["cpu"].missing:
        return plain(q, k, v, position)
    kernel = functools.partial(_kernel, window=window, scale=scale)
    return jax.lax.platform_dependent(q, k, v, position, cpu=kernel, default=plain)


@_one_token.defjvp
def _of_plain(window, scale, primals, tangents):
    return jax.jvp(functools.partial(_plain, window=window, scale=scale), primals, tangents)


def _kernel(q, k, v, position, window, scale):
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    call = jax.ffi.ffi_call(ATTEND, result, vmap_method="broadcast_all")
    return call(q, k, v, position, window=np.int64(window), scale=np.float32(scale))


def _plain(q, k, v, position, window, scale):
    kv_heads, size, width = k.shape
    # Heads that share keys are rows of one matrix, so that nothing is transposed.
    of_heads = q.reshape(kv_heads, -1, width)
    scores = jnp.einsum("kqd,ksd->kqs", of_heads, k, preferred_element_type=jnp.float32) * scale
    behind = position - jnp.arange(size, dtype=jnp.int32)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("kqs,ksd->kqd", weights, v).reshape(q.shape)


def _check(q: Array, k: Array, v: Array, position: Array) -> None:
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        given = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise TypeError(f"{_OP}: q, k and v must be of one dtype, {names_of(FLOATS)}; got {given}")
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise TypeError(f"{_OP}: position must be an integer; got {position.dtype}")
    if position.ndim > 0:
        raise ValueError(f"{_OP}: position must have shape (); got {position.shape}")
    shapes = q.ndim == 2 and k.ndim == 3 and k.shape == v.shape and k.shape[-1] == q.shape[-1]
    if not shapes or 0 in q.shape + k.shape:
        given = f"{q.shape}, {k.shape} and {v.shape}"
        raise ValueError(
            f"{_OP}: q must have shape (heads, D), k and v (kv_heads, S, D), none 0; got {given}"
        )
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"{_OP}: heads must be a multiple of kv_heads, {k.shape[0]}; got {q.shape[0]}")


def _checked_window(window) -> int:
    if not isinstance(window, Integral):
        raise TypeError(f"{_OP}: window must be an int; got {type(window).__name__}")
    if window < 0:
        raise ValueError(f"{_OP}: window must not be negative; got {window}")
    return int(window)


def _checked_scale(scale) -> float:
    try:
        return float(scale)
    except (TypeError, ValueError):  # a tracer too, and text
        raise TypeError(f"{_OP}: scale must be a float; got {type(scale).__name__}") from None
