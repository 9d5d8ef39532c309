"""Layers of a model as a scan: over the stacked weights, and over an index into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv

LAYERS = 4


@pytest.fixture(params=["float32", "bfloat16"])
def model(request, rng):
    """Square layers, stacked; sums stay exact because each step is reduced modulo 5."""
    n = 32 if request.param == "float32" else 256
    problems = [
        make(rng, 4, request.param, Case(2, n, n, 16 * n // 32, "zero"), exact=True) for _ in range(LAYERS)
    ]
    x = expected = problems[0].x
    for p in problems:
        expected = (np.asarray(expected, np.float64) @ p.weight().T) % 5
    return x, jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems)), expected


def scanned(x, w, backend):
    def layer(x, w):
        return (gemv(x, w, out_dtype="float32", implementation=backend) % 5).astype(x.dtype), None

    return jax.lax.scan(layer, x, w)[0]


def indexed(x, w, backend):
    def layer(i, x):
        return (gemv(x, w, index=i, out_dtype="float32", implementation=backend) % 5).astype(x.dtype)

    return jax.lax.fori_loop(0, w.shape[0], layer, x)


@pytest.mark.parametrize("f", [scanned, indexed])
def test_layers(backend, model, f):
    x, w, expected = model
    np.testing.assert_array_equal(jax.jit(f, static_argnums=2)(x, w, backend), expected)


def test_static_fields_survive_slicing(backend, rng):
    """A ragged K and a ragged group: k and group_size are of the layer, not of the stack."""
    problems = [make(rng, 3, "float32", Case(2, 11, 11, 4, "offset"), exact=True) for _ in range(3)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    assert (w.k, w.group_size, w.shape) == (11, 4, (3, 11, 11))
    y = jax.lax.scan(lambda _, w: (None, gemv(problems[0].x, w, implementation=backend)), None, w)[1]
    np.testing.assert_array_equal(y, [problems[0].x @ p.weight().T for p in problems])


@pytest.mark.parametrize("model", ["float32"], indirect=True)  # 16 bits would round between the layers
@pytest.mark.parametrize("f", [scanned, indexed])
def test_grad(backend, model, f):
    """Reverse mode through the loop (modulo has the derivative 1); two layers, so that it stays exact."""
    x, w, _ = model
    w = jax.tree.map(lambda a: a[:2], w)
    grad = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w, backend))))(x, w)
    expected = (
        np.ones((2, 32))
        @ np.asarray(w[1].dequantize(), np.float64)
        @ np.asarray(w[0].dequantize(), np.float64)
    )
    np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("model", ["float32"], indirect=True)
def test_grad_of_scales(backend, model):
    """Exact: one layer's products only."""
    x, w, _ = model

    def loss(scale, f):
        stack = QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4)
        return f(x, stack)

    def scan(x, w):
        return jax.lax.scan(lambda s, w: (s + gemv(x, w, implementation=backend).sum(), None), 0.0, w)[0]

    def unrolled(x, w):
        return sum(gemv(x, w[i], implementation=backend).sum() for i in range(LAYERS))

    np.testing.assert_array_equal(jax.grad(loss)(w.scale, scan), jax.grad(loss)(w.scale, unrolled))


def test_scan_of_vmap(backend, model):
    x, w, expected = model
    batch = jnp.stack([x, x])
    y = jax.jit(jax.vmap(lambda x: scanned(x, w, backend)))(batch)
    np.testing.assert_array_equal(y, np.stack([expected] * 2))
