"""Checks of what `gemv` takes besides the weight; those of the weight are in _check.py."""

import math
from contextlib import suppress
from numbers import Real
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxgemv import _around
from jaxgemv._check import FLOAT8, FLOATS, as_array, as_dtype, as_index, check_float, names_of
from jaxgemv._shapes import known
from jaxgemv._tensor import QuantizedTensor


class Asked(NamedTuple):
    """What was asked for besides x and w, as the caller gave it."""

    index: Any = None
    norm: Any = None
    eps: Any = 0.0
    round_norm: Any = False
    bias: Any = None
    activation: str | None = None
    residual: Any = None
    x_scale: Any = None
    out_dtype: Any = None
    implementation: str | None = None


def check_x(op: str, x, dtypes) -> Array:
    x = as_array(op, "x", x)
    if x.dtype not in dtypes:
        raise TypeError(
            f"{op}: x must be one of {', '.join(jnp.dtype(d).name for d in dtypes)}; got {x.dtype}"
        )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must have shape (..., K) with K >= 1; got {tuple(x.shape)}")
    return jnp.asarray(x)


def check_out_dtype(op: str, out_dtype, allowed, default):
    if out_dtype is None:
        return jnp.dtype(default)
    dtype = as_dtype(op, "out_dtype", out_dtype)
    if dtype not in allowed:
        names = ", ".join(jnp.dtype(d).name for d in allowed)
        raise TypeError(f"{op}: out_dtype must be one of {names}; got {dtype}")
    return dtype


def check_eps(op: str, eps) -> float:
    number = math.nan
    if isinstance(eps, Real):
        with suppress(OverflowError):  # of an integer
            number = float(eps)
    if not 0 <= number <= float(np.finfo(np.float32).max):  # in which it is added
        raise ValueError(f"{op}: eps must be a number, 0 or more; got {eps!r}")
    return number


def check_round_norm(op: str, round_norm) -> bool:
    if not isinstance(round_norm, bool | np.bool_):
        raise TypeError(f"{op}: round_norm must be True or False; got {round_norm!r}")
    return bool(round_norm)


def check_integer_product(op: str, w: QuantizedTensor, asked: Asked) -> None:
    if w.zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer):
        raise TypeError(f"{op}: zero must be an integer array when scale is None; got {w.zero.dtype}")
    if w.packed.dtype in FLOAT8:
        raise TypeError(f"{op}: scale must be an array for weights of {w.packed.dtype}; got None")
    if w.offset is not None or w.codebook is not None or asked.bias is not None:
        raise ValueError(f"{op}: offset, codebook and bias need scale; got scale=None")
    if asked.activation or any(a is not None for a in (asked.residual, asked.x_scale, w.global_scale)):
        raise ValueError(f"{op}: activation, residual, x_scale and global_scale need scale; got scale=None")


def check_parts(op: str, asked: Asked, x: Array, shape, index: Array | None, name: str) -> dict[str, Array]:
    """norm, bias, x_scale and residual, those given, as Operands takes them. shape: of the weight or its words."""
    n, k = shape[-2], x.shape[-1]
    known = (*_around.ACTIVATIONS, *_around.GATED)
    if asked.activation is not None and asked.activation not in known:
        raise ValueError(
            f"{op}: activation must be None or one of {', '.join(known)}; got {asked.activation!r}"
        )
    gated = _around.is_gated(asked.activation)
    if gated and n % 2:
        raise ValueError(f"{op}: {name} must have an even number of rows for {asked.activation}; got {shape}")
    stack = None if index is None else shape[0]
    checked = {}
    for part, a, width in (("norm", asked.norm, k), ("bias", asked.bias, n)):
        if a is not None:
            checked[part] = _check_vector(op, part, a, width, stack)
    if "norm" in checked and x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be {names_of(FLOATS)} for norm; got {x.dtype}")
    if asked.x_scale is not None:
        checked["x_scale"] = _check_x_scale(op, asked.x_scale, x)
    if asked.residual is not None:
        residual = check_float(op, "residual", asked.residual)
        expected = (*x.shape[:-1], n // 2 if gated else n)
        if tuple(residual.shape) != expected:
            raise ValueError(
                f"{op}: residual must have the result's shape, {expected}; got {tuple(residual.shape)}"
            )
        checked["residual"] = jnp.asarray(residual)
    return checked


def _check_x_scale(op: str, x_scale, x: Array) -> Array:
    """x_scale as (..., groups of x), of which there is one where each row has one scale."""
    if x.dtype != jnp.int8:
        raise TypeError(f"{op}: x must be int8 for x_scale; got {x.dtype}")
    x_scale = jnp.asarray(check_float(op, "x_scale", x_scale, (jnp.float32,)))
    if x_scale.ndim == 0:
        return jnp.broadcast_to(x_scale, (*x.shape[:-1], 1))
    lead, k = tuple(x.shape[:-1]), x.shape[-1]
    groups = x_scale.shape[-1]
    if x_scale.shape[:-1] != lead or groups == 0 or k % groups:
        expected = ", ".join(map(str, (*lead, "G")))
        raise ValueError(
            f"{op}: x_scale must have shape () or ({expected}) with G a divisor of K = {k}; got {x_scale.shape}"
        )
    return x_scale


def _check_vector(op: str, name: str, a, width: int, stack: int | None) -> Array:
    a = check_float(op, name, a)
    if a.shape != (width,) and (stack is None or a.shape != (stack, width)):
        either = "" if stack is None else f" or ({stack}, {width})"
        raise ValueError(f"{op}: {name} must have shape ({width},){either}; got {tuple(a.shape)}")
    a = jnp.asarray(a)
    return a[None] if stack is not None and a.ndim == 1 else a


def check_index(op: str, index, x: Array, name: str, shape: tuple[int, ...]) -> Array | None:
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


def known_entry(index, x: Array, shape: tuple[int, ...]) -> int | None:
    """The entry that index names, if it is a plain number in a trace: the host then finds the entry's arrays.

    Outside of a trace, each number would need a compilation of its own.
    """
    stack = known(shape[0])
    if stack is None or not isinstance(index, int | np.integer) or not isinstance(x, Tracer):
        return None
    return int(index) if 0 <= index < stack else None
