"""What is measured: one row of SYSTEMS for each way to store a weight and multiply by it. See also torch_systems.py."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxgemv
from jaxgemv._formats import FORMATS

SHAPES = {  # N x K
    "gpu": (
        # The linear layers of Llama 3 8B and 70B, Qwen 2 7B, and a square.
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (18944, 3584),
        (8192, 8192),
        (28672, 8192),
        (8192, 28672),
        # The other squares.
        (512, 512),
        (1024, 1024),
        (2048, 2048),
        (16384, 16384),
        # Few outputs (a key or value projection, a router), and very many (the last layer of Llama 3).
        (256, 4096),
        (1024, 4096),
        (128256, 4096),
    ),
    "cpu": ((4096, 4096), (14336, 4096), (4096, 14336)),
}
QUICK_SHAPES = {
    "gpu": ((4096, 4096), (28672, 4096), (8192, 28672), (1024, 1024)),
    "cpu": ((4096, 4096),),
}


class System(NamedTuple):
    name: str
    format: str
    dtypes: dict[str, tuple[str, ...]]  # of x, for each platform where the system is measured
    weights: Callable  # (seed, n, k, dtype of x) -> one copy of the weight, a pytree
    product: Callable  # (x, weight) -> y


def _key(seed):
    return jax.random.key(seed, impl="rbg")


@partial(jax.jit, static_argnames="shape")
def _random_words(seed, shape):
    return jax.random.bits(_key(seed), shape, jnp.uint32)


@lru_cache(maxsize=1)
def _affine_on_host(n: int, groups: int | None, codes: range, dtype):
    rng = np.random.default_rng(0)
    shape = (n,) if groups is None else (n, groups)
    scale = (rng.uniform(0.5, 1.5, shape) / len(codes)).astype(dtype)
    return scale, None if groups is None else rng.integers(codes.start, codes.stop, shape).astype(dtype)


def _affine(n: int, groups: int | None, codes: range, dtype):
    """A scale and a zero for each group, or a scale for each row: from the host, which spares a compilation."""
    return jax.tree.map(jnp.array, _affine_on_host(n, groups, codes, jnp.dtype(dtype)))


def _quantized(seed, n, k, dtype, *, bits, group=None):
    """Random codes; scales and zeros in x's dtype."""
    groups = None if group is None else -(-k // group)
    scale, zero = _affine(n, groups, range(1 << bits), dtype)
    words = _random_words(seed, (n, -(-k * bits // 32)))
    return jaxgemv.QuantizedTensor(packed=words, scale=scale, zero=zero, bits=bits, group_size=group, k=k)


@partial(jax.jit, static_argnames=("n", "k", "dtype", "format"))
def _formatted(seed, n, k, dtype, *, format):
    """Random codes of a format with a name, and scales in its dtype, or float32. float8 codes are never NaN."""
    of = FORMATS[format]
    shape = (n,) if of.group_size is None else (n, -(-k // of.group_size))
    scale = jax.random.uniform(_key(seed), shape, minval=0.5, maxval=1.5).astype(of.scale_dtype or "float32")
    if of.codebook is None:
        codes = jax.random.bits(_key(seed), (n, k), jnp.uint8) & 0xF7
        return jaxgemv.QuantizedTensor(
            packed=jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale=scale
        )
    words = _random_words(seed, (n, k * of.bits // 32))
    return jaxgemv.QuantizedTensor(packed=words, scale=scale, codebook=jnp.asarray(of.values), bits=of.bits)


@partial(jax.jit, static_argnames=("n", "k", "dtype"))
def _matrix(seed, n, k, dtype):
    return jax.random.normal(_key(seed), (n, k), dtype)


@partial(jax.jit, static_argnames=("n", "k"))
def _codes(seed, n, k):
    return jax.random.bits(_key(seed), (n, k), jnp.uint8).astype(jnp.int4)


def _int4(seed, n, k, dtype, *, group=None):
    """JAX's own int4, with the rest as in _quantized."""
    groups = None if group is None else k // group
    return _codes(seed, n, k), *_affine(n, groups, range(-8, 8), dtype)


def dot(x, w):
    """x @ w.T, without the copy of w.T that XLA would make on a CPU."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _scaled_dot(x, w):
    codes, scale, _ = w
    return dot(x, codes.astype(x.dtype)) * scale


def _dequantized(w, dtype):
    codes, scale, zero = w
    if zero is None:
        return codes.astype(dtype) * scale.astype(dtype)[:, None]
    groups = codes.reshape(*scale.shape, -1).astype(dtype)
    return ((groups - zero.astype(dtype)[..., None]) * scale.astype(dtype)[..., None]).reshape(codes.shape)


def _dequantizing_dot(x, w):
    return dot(x, _dequantized(w, x.dtype))


@jax.jit
def dense(w):
    """The float32 (N, K) that a weight stands for."""
    if isinstance(w, jaxgemv.QuantizedTensor):
        return w.dequantize(jnp.float32)
    return _dequantized(w, jnp.float32) if isinstance(w, tuple) else w.astype(jnp.float32)


_QUANTIZED_X = {"gpu": ("float16", "bfloat16"), "cpu": ("float32", "bfloat16")}
_F16, _BF16 = {"gpu": ("float16",)}, {"gpu": ("bfloat16",)}


def _jaxgemv(format: str, dtypes: dict, weights: Callable) -> System:
    return System("jaxgemv", format, dtypes, weights, jaxgemv.gemv)


SYSTEMS = (
    _jaxgemv("int4 g128", _QUANTIZED_X, partial(_quantized, bits=4, group=128)),
    _jaxgemv("int8", _QUANTIZED_X, partial(_quantized, bits=8)),
    _jaxgemv("int2 g128", {"gpu": ("float16", "bfloat16")}, partial(_quantized, bits=2, group=128)),
    *(_jaxgemv(name, _BF16 | {"cpu": ("float32",)}, partial(_formatted, format=name)) for name in FORMATS),
    _jaxgemv("f16", _F16, _matrix),
    _jaxgemv("bf16", _BF16, _matrix),
    System("XLA", "f32", {"cpu": ("float32",)}, _matrix, dot),
    System("XLA", "bf16", _BF16 | {"cpu": ("bfloat16",)}, _matrix, dot),
    # XLA's best int4 is the better of these two.
    System("XLA", "int4 channel", _BF16, _int4, _scaled_dot),
    System("XLA", "int4 g128", _BF16, partial(_int4, group=128), _dequantizing_dot),
)

# What other rows of the same shape and M are compared with. On a CPU XLA is slower in bf16 than in f32.
BASELINE = {"gpu": ("XLA", "bf16"), "cpu": ("XLA", "f32")}


def without_kernel(system: System, n: int, k: int, rows: int, dtype: str, implementation: str) -> str | None:
    """Why jaxgemv would run its reference here: a time that must not pass for a kernel's."""
    if system.name != "jaxgemv":
        return None
    w = jax.eval_shape(lambda: system.weights(0, n, k, dtype))
    x = jax.ShapeDtypeStruct((rows, k), dtype)
    try:
        jax.eval_shape(partial(system.product, implementation=implementation), x, w)
    except NotImplementedError as error:
        return str(error)
    return None
