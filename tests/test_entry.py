"""index as a number inside jit: the host finds that layer's arrays, and the program has no index."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import mesh_of, put_weight
from test_lowering import calls, lowered, with_kernels

from jaxgemv import codebooks, gemv, quantize

STACK = 3
CASE = Case(2, 256, 256, 64, "zero", bias=True)


@pytest.fixture
def layers(rng):
    problems = [make(rng, 4, "bfloat16", CASE, exact=True) for _ in range(STACK)]
    return problems, jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))


def each_layer(backend, w, **parts):
    """f(x, i), with i as a number."""
    f = jax.jit(lambda x, i: gemv(x, w, index=i, implementation=backend, **parts), static_argnums=1)
    return lambda x: [f(x, i) for i in range(STACK)]


@pytest.mark.parametrize("rows", [1, 2, 17, 80])
def test_every_layer(backend, layers, rows, rng):
    problems, w = layers
    bias = jnp.stack([p.bias for p in problems])
    x = rng.integers(-2, 3, (rows, problems[0].k)).astype(problems[0].x.dtype)
    for p, y in zip(problems, each_layer(backend, w, bias=bias, out_dtype="float32")(x), strict=True):
        expected = np.asarray(x, np.float64) @ p.weight().T + np.asarray(p.bias, np.float64)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "nvfp4", "fp8", "mxfp8"])
def test_formats(backend, format, rng):
    """All arrays of a weight, and what has a row for each layer: as an index that is an array finds them."""
    w = jax.tree.map(
        lambda *a: jnp.stack(a),
        *(quantize(rng.standard_normal((256, 512)).astype(np.float32), format=format) for _ in range(STACK)),
    )
    if w.codebook is not None:
        w = dataclasses.replace(w, codebook=jnp.stack([i * codebooks.NF4 for i in range(1, STACK + 1)]))
    x = jnp.asarray(rng.standard_normal((2, 512)), jnp.bfloat16)
    norm = jnp.asarray(rng.standard_normal((STACK, 512)), jnp.float32)
    parts = {"norm": norm, "bias": norm[:, :256], "activation": "silu"}
    array = jax.jit(lambda x, i: gemv(x, w, index=i, implementation=backend, **parts))
    for i, y in enumerate(each_layer(backend, w, **parts)(x)):
        expected = array(x, jnp.int32(i))
        if backend != "xla":
            np.testing.assert_array_equal(y, expected)
        # XLA may add up in another order.
        np.testing.assert_allclose(y.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("bad", [-1, STACK, 2**31 - 1, 2**40])
def test_out_of_range(backend, layers, bad):
    problems, w = layers
    y = jax.jit(lambda x: gemv(x, w, index=bad, implementation=backend))(problems[0].x)
    assert np.isnan(np.asarray(y, np.float32)).all()


@with_kernels
def test_program(platform, layers):
    problems, w = layers
    x = problems[0].x
    (line,) = calls(lowered(platform, lambda x, w: gemv(x, w, index=1), x, w))
    assert "entry = 1 : i64" in line
    assert ",index" not in line
    each = jax.vmap(lambda x: gemv(x, w, index=1))  # rows of one call
    (line,) = calls(lowered(platform, each, x))
    assert "entry = 1 : i64" in line
    # What is known of one stack does not hold for that of several.
    several = jax.tree.map(lambda a: jnp.stack([a, a]), w)
    (line,) = calls(lowered(platform, jax.vmap(lambda x, w: gemv(x, w, index=1), (None, 0)), x, several))
    assert "entry" not in line
    assert ",index" in line


def test_stacks_of_a_vmap(backend, layers):
    problems, w = layers
    several = jax.tree.map(lambda a: jnp.stack([a, 2 * a if a.dtype != jnp.uint32 else a]), w)
    f = jax.jit(jax.vmap(lambda w: gemv(problems[0].x, w, index=2, implementation=backend)))
    y = f(several)
    for i in range(2):
        entry = jax.tree.map(lambda a, i=i: a[i, 2], several)
        np.testing.assert_array_equal(y[i], gemv(problems[0].x, entry, implementation=backend))


def test_gradient(backend, layers):
    problems, w = layers
    x = problems[0].x

    def loss(x, index):
        return jnp.sum(gemv(x, w, index=index, implementation=backend).astype(jnp.float32) ** 2)

    known = jax.jit(jax.grad(lambda x: loss(x, 2)))(x)
    np.testing.assert_array_equal(known, jax.jit(jax.grad(loss))(x, jnp.int32(2)))


@pytest.mark.parametrize("spec", [P("x", None, None), P(None, "x", None), P(None, None, "x")], ids=str)
def test_over_devices(on_cpu, layers, spec):
    """Where devices have different layers, each has a number of its own for it."""
    problems, w = layers
    w = jax.tree.map(lambda a: jnp.concatenate([a, a[:1]]), w)
    mesh = mesh_of(AxisType.Auto, (2,), ("x",))
    placed = put_weight(w, mesh, *spec)
    for i, p in enumerate([*problems, problems[0]]):
        y = jax.jit(lambda x, w, i=i: gemv(x, w, index=i, out_dtype="float32"))(problems[0].x, placed)
        np.testing.assert_array_equal(y, np.asarray(problems[0].x, np.float64) @ p.weight().T)
