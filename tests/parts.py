"""norm, activation and residual in float64, spelled out, and what their errors are relative to."""

from math import erf

import jax.numpy as jnp
import numpy as np
from problems import Problem

ACTIVATIONS = ["relu", "silu", "gelu", "gelu_exact", "swiglu", "geglu"]
GATED = {"swiglu": "silu", "geglu": "gelu"}
EPS = 1e-3


def activated(y: np.ndarray, activation: str | None) -> np.ndarray:
    if activation in GATED:
        gate, up = np.split(y, 2, axis=-1)
        return activated(gate, GATED[activation]) * up
    if activation == "gelu_exact":
        return y * np.vectorize(lambda t: (1 + erf(t / 2**0.5)) / 2)(y)
    return {
        None: lambda y: y,
        "relu": lambda y: np.where(y < 0, 0, y),
        "silu": lambda y: y / (1 + np.exp(-y)),
        "gelu": lambda y: y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
    }[activation](y)


def operands(rng, p: Problem, parts: str, activation: str | None, dtype="float32") -> dict[str, np.ndarray]:
    """The arrays of "norm", "bias" and "residual", as far as `parts` names them."""
    rows, n, k = *p.x.shape[:-1], len(p.packed), p.k
    made = {
        "norm": rng.uniform(0.5, 1.5, k),
        "bias": rng.standard_normal(n),
        "residual": rng.standard_normal((rows, n // 2 if activation in GATED else n)),
    }
    return {name: made[name].astype(jnp.dtype(dtype)) for name in made if name in parts.split()}


def normalised(x, norm) -> np.ndarray:
    """What meets the weight, float64 (..., K); without a norm x itself."""
    h = np.asarray(x, np.float64)
    if norm is None:
        return h
    return h / np.sqrt((h**2).mean(-1, keepdims=True) + EPS) * np.asarray(norm, np.float64)


def answer(p: Problem, activation=None, norm=None, bias=None, residual=None) -> tuple[np.ndarray, np.ndarray]:
    """(the result, the magnitude), both float64"""
    h = normalised(p.x, norm)
    bias = np.asarray(0 if bias is None else bias, np.float64)
    residual = np.asarray(0 if residual is None else residual, np.float64)
    sums = h @ p.weight().T + bias
    magnitude = np.abs(h) @ p.weight_magnitude().T + np.abs(bias)
    exact = activated(sums, activation)
    if activation in GATED:
        # Either half's error times the other, both with room for the slope of the gate, which is below 1.13.
        gate, up = np.split(sums, 2, -1)
        first, second = np.split(magnitude, 2, -1)
        magnitude = 1.2 * (first * np.abs(up) + second * np.abs(gate)) + np.abs(exact)
    elif activation:
        magnitude = 1.2 * magnitude + np.abs(exact)
    return exact + residual, magnitude + np.abs(residual)
