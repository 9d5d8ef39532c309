"""What is measured: one row of SYSTEMS for each way to store a weight and multiply by it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxgemv

# N x K of the linear layers of Llama 3 8B and 70B, Qwen 2 7B, and a square.
SHAPES = {
    "gpu": (
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (18944, 3584),
        (8192, 8192),
        (28672, 8192),
        (8192, 28672),
    ),
    "cpu": ((4096, 4096), (14336, 4096), (4096, 14336)),
}
QUICK_SHAPES = {"gpu": ((4096, 4096), (8192, 28672)), "cpu": ((4096, 4096),)}


class System(NamedTuple):
    name: str
    format: str
    dtypes: dict[str, tuple[str, ...]]  # of x, for each platform where the system is measured
    weights: Callable  # (key, n, k, dtype of x) -> one copy of the weight, a pytree
    product: Callable  # (x, weight) -> y
    dense: Callable  # weight -> the float32 (N, K) that it stands for


@partial(jax.jit, static_argnames=("n", "k", "dtype", "bits", "group", "zero"))
def quantized(key, n, k, dtype, *, bits, group=None, zero=False):
    """Random codes, with scale and zero in x's dtype; one scale a row where there is no group."""
    keys = jax.random.split(key, 3)
    shape = (n,) if group is None else (n, -(-k // group))
    codes = 1 << bits
    return jaxgemv.QuantizedTensor(
        packed=jax.random.bits(keys[0], (n, -(-k * bits // 32)), jnp.uint32),
        scale=jax.random.uniform(keys[1], shape, jnp.float32, 0.5 / codes, 1.5 / codes).astype(dtype),
        zero=jax.random.randint(keys[2], shape, 0, codes).astype(dtype) if zero else None,
        bits=bits,
        group_size=group,
        k=k,
    )


@partial(jax.jit, static_argnames=("n", "k", "dtype"))
def dense(key, n, k, dtype):
    return jax.random.normal(key, (n, k), dtype)


def _float32(w):
    return w.astype(jnp.float32)


def _dequantized(w):
    return w.dequantize(jnp.float32)


def _dot(x, w):
    """x @ w.T, without the copy of w.T that XLA would make on a CPU."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


_QUANTIZED_X = {"gpu": ("float16", "bfloat16"), "cpu": ("float32", "bfloat16")}

SYSTEMS = (
    System(
        "jaxgemv",
        "int4 g128",
        _QUANTIZED_X,
        partial(quantized, bits=4, group=128, zero=True),
        jaxgemv.gemv,
        _dequantized,
    ),
    System("jaxgemv", "int8", _QUANTIZED_X, partial(quantized, bits=8), jaxgemv.gemv, _dequantized),
    System("XLA", "f32", {"cpu": ("float32",)}, dense, _dot, _float32),
    System("XLA", "bf16", {"gpu": ("bfloat16",), "cpu": ("bfloat16",)}, dense, _dot, _float32),
)

# What other rows of the same shape and M are compared with. On a CPU XLA is slower in bf16 than in f32.
BASELINE = {"gpu": ("XLA", "bf16"), "cpu": ("XLA", "f32")}


def without_kernel(system: System, n: int, k: int, rows: int, dtype: str, implementation: str) -> str | None:
    """Why jaxgemv would run its reference here: a time that must not pass for a kernel's."""
    if system.name != "jaxgemv":
        return None
    w = jax.eval_shape(lambda: system.weights(jax.random.key(0), n, k, dtype))
    x = jax.ShapeDtypeStruct((rows, k), dtype)
    try:
        jax.eval_shape(partial(system.product, implementation=implementation), x, w)
    except NotImplementedError as error:
        return str(error)
    return None


@partial(jax.jit, static_argnames="dense")
def relative_error(y, x, w, dense):
    """||y - ref|| / ||ref||, with the reference in float32."""
    expected = jnp.dot(x.astype(jnp.float32), dense(w).T, precision="highest")
    return jnp.linalg.norm(y.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
