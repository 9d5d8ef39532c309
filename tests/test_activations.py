"""examples/activations.py: products of x in 8 bits, which are what numpy makes of the same bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemv import quantize
from jaxgemv._ffi import backends

pytest.importorskip("safetensors")

K = 96


def in_bytes(x, group=32):
    """x (M, K) as int8 with one scale a group stands for it, in float64."""
    groups = np.asarray(x, np.float64).reshape(len(x), -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.round(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.fixture
def linear(example):
    return example("decode").LINEAR["int8"]


@pytest.mark.parametrize("weight", [{"bits": 4}, {"bits": 8, "symmetric": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_products(rows, weight, linear, on_cpu, rng):
    """The parts are around x and y as ever; a kernel multiplies."""
    x = rng.standard_normal((rows, K)).astype(np.float32)
    x[0, :32] = 0  # a group without a scale
    norm, bias = (rng.uniform(0.5, 1.5, n).astype(np.float32) for n in (K, 80))
    w = quantize(rng.standard_normal((80, K)).astype(np.float32), group_size=32, **weight)
    dense = np.asarray(w.dequantize(), np.float64)
    residual = rng.standard_normal((rows, 40)).astype(np.float32)

    def product(x, w):
        return linear(x, w, norm=norm, eps=1e-3, bias=bias, activation="swiglu", residual=residual)

    x64 = x.astype(np.float64)
    normed = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-3) * norm
    y = in_bytes(normed) @ dense.T + bias
    expected = silu(y[:, :40]) * y[:, 40:] + residual
    found = jax.jit(product)(x, w)
    assert found.dtype == jnp.float32
    # float32 may round an element to another byte than float64: one of 127 steps.
    step = np.abs(normed).max() / 127 * np.abs(dense).max()
    np.testing.assert_allclose(found, expected, atol=2 * step * np.abs(y).max())
    assert "jaxgemv" in jax.jit(product).lower(x, w).as_text() or backends["cpu"].missing
    exact = normed @ dense.T + bias
    assert (
        np.abs(found - expected).max()
        < np.abs(expected - silu(exact[:, :40]) * exact[:, 40:] - residual).max()
    )


def test_any_k(linear, on_cpu, rng):
    """Groups are then as long as they can be."""
    x = rng.standard_normal((1, 40)).astype(np.float32)
    w = quantize(rng.standard_normal((24, 40)).astype(np.float32), bits=4, group_size=40)
    expected = in_bytes(x, 8) @ np.asarray(w.dequantize(), np.float64).T
    np.testing.assert_allclose(linear(x, w), expected, atol=1e-2)


def test_others_are_exact(example, on_cpu, rng):
    """A table of floats, float8 and dense weights have no products of bytes."""
    decode = example("decode")
    x = rng.standard_normal((1, 64)).astype(np.float32)
    dense = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    for w in (dense, quantize(dense, format="nf4"), quantize(dense, format="fp8")):
        np.testing.assert_array_equal(decode.LINEAR["int8"](x, w), decode.LINEAR["exact"](x, w))
