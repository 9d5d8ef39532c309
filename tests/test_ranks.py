"""Everything where `jax_numpy_rank_promotion` is "raise", which refuses that a vector meets a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemv import attention, gemv, quantize, quantize_activations
from jaxgemv.reference import gemv as reference_gemv

WEIGHTS = [dict(bits=b, group_size=32) for b in (1, 3, 4, 8)] + [
    dict(bits=4, group_size=None),
    dict(bits=4, symmetric=True, method="minmax"),
    *(dict(format=f) for f in ("nf4", "mxfp4", "nvfp4", "fp8", "mxfp8")),
]
PARTS = dict(bias=jnp.ones(64), norm=jnp.ones(96), residual=jnp.ones((2, 64)), activation="silu")


@pytest.fixture(autouse=True)
def _raise():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def weight(rng):
    return rng.standard_normal((64, 96)).astype(np.float32)


@pytest.mark.parametrize("given", WEIGHTS, ids=str)
def test_products(given, weight):
    w = quantize(weight, **given)
    x = jnp.ones((2, 96))
    expected = reference_gemv(x, w, **PARTS)
    np.testing.assert_allclose(gemv(x, w, **PARTS), expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(gemv(x, w, implementation="xla", **PARTS), expected, rtol=1e-5, atol=1e-3)
    # More rows than kernels take.
    many = gemv(jnp.ones((100, 96)), w, **PARTS | dict(residual=jnp.ones((100, 64))))
    np.testing.assert_allclose(many[:2], expected, rtol=1e-5, atol=1e-3)
    assert w.dequantize().shape == weight.shape
    assert jax.grad(lambda x: gemv(x, w, **PARTS).sum())(x).shape == x.shape


def test_stacks(weight):
    w = jax.tree.map(lambda a: jnp.stack([a] * 3), quantize(weight, bits=4, group_size=32))
    x, index = jnp.ones((4, 2, 96)), jnp.array([2, 0, 1, 1])
    parts = dict(bias=jnp.ones((3, 64)), norm=jnp.ones((3, 96)))
    y = jax.jit(lambda x, index: gemv(x, w, index=index, **parts))(x, index)
    np.testing.assert_allclose(
        y, gemv(x, w, index=index, implementation="xla", **parts), rtol=1e-5, atol=1e-3
    )
    mapped = jax.vmap(lambda x, i: gemv(x, w, index=i, **parts))(x, index)
    np.testing.assert_allclose(mapped, y, rtol=1e-5, atol=1e-3)


def test_quantize(weight):
    importance = np.linspace(1, 2, 96, dtype=np.float32)
    for given in (dict(bits=4), dict(bits=1), dict(format="nf4"), dict(format="mxfp4")):
        assert quantize(weight, importance=importance, **given).shape == weight.shape
    codes, scale = quantize_activations(weight, group_size=32)
    assert gemv(codes, quantize(weight, bits=8), x_scale=scale).shape == (64, 64)


def test_attention():
    q, kv = jnp.ones((4, 16)), jnp.ones((2, 32, 16))
    np.testing.assert_allclose(attention.one_token(q, kv, kv, 3, window=2), q, rtol=1e-6)
