"""vmap over x, over the weights, over both, over parts of the weights, and nested."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv

CASE = Case(5, 12, 72, 24, "zero", bias=True)
# So that x may have 16 bits, which fast kernels need, and all is exact still.
FAST = Case(5, 256, 256, 64, "zero", bias=True)
gemv_f32 = partial(gemv, out_dtype="float32")


def stack_of(rng, size, bits=4, case=FAST, x="bfloat16"):
    """`size` problems, and their arrays stacked."""
    problems = [make(rng, bits, x, case, exact=True) for _ in range(size)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    return problems, np.stack([p.x for p in problems]), w, np.stack([p.bias for p in problems])


def answers(problems):
    return np.stack([p.answer() for p in problems])


@pytest.mark.parametrize("axis", [0, 1])
def test_over_x(backend, axis, rng):
    p = make(rng, 4, "float16", FAST, exact=True)
    x = np.stack([p.x, p.x + np.ones((), p.x.dtype)], axis)
    y = jax.vmap(lambda x: gemv_f32(x, p.tensor, bias=p.bias, implementation=backend), axis, axis)(x)
    expected = np.stack([p.answer(), p.answer() + p.weight().sum(1)], axis)
    np.testing.assert_array_equal(y, expected)


def test_over_rows(backend, rng):
    p = make(rng, 3, "float32", CASE, exact=True)
    y = jax.vmap(lambda x: gemv_f32(x, p.tensor, bias=p.bias, implementation=backend))(p.x)
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize(("bits", "x", "case"), [(3, "float32", CASE), (4, "bfloat16", FAST)], ids=str)
def test_over_both(backend, bits, x, case, rng):
    problems, x, w, bias = stack_of(rng, 3, bits, case, x)
    y = jax.vmap(lambda x, w, b: gemv_f32(x, w, bias=b, implementation=backend))(x, w, bias)
    np.testing.assert_array_equal(y, answers(problems))


def test_over_weights(backend, rng):
    problems, x, w, bias = stack_of(rng, 3)
    y = jax.vmap(lambda w, b: gemv_f32(x[0], w, bias=b, implementation=backend))(w, bias)
    expected = [np.asarray(x[0], float) @ p.weight().T + np.asarray(p.bias, float) for p in problems]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("field", ["packed", "scale", "zero", "bias"])
def test_over_one_array(backend, field, rng):
    """The arrays that are not mapped serve every entry."""
    problems, _, w, bias = stack_of(rng, 3)
    p = problems[0]

    def f(a):
        arrays = {"packed": p.packed, "scale": p.scale, "zero": p.zero, "bias": p.bias, field: a}
        b = arrays.pop("bias")
        return gemv_f32(p.x, QuantizedTensor(**arrays, bits=4), bias=b, implementation=backend)

    stacked = bias if field == "bias" else getattr(w, field)
    expected = [f(a) for a in stacked]
    np.testing.assert_array_equal(jax.vmap(f)(stacked), expected)


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("field", ["packed", "scale", "zero", "bias", "norm", "residual"])
def test_derivatives_over_one_array(backend, field, with_index, rng):
    """Of x, with which each entry is multiplied: as if they were called one by one."""
    size = 3
    w = jax.tree.map(jnp.asarray, make(rng, 4, "float32", Case(5, 12, 72, 24, "zero")).tensor)
    x = jnp.asarray(rng.standard_normal((5, 72)), jnp.float32)
    parts = {
        "bias": rng.standard_normal(12),
        "norm": rng.uniform(0.5, 1, 72),
        "residual": rng.standard_normal((5, 12)),
    }
    parts = {name: jnp.asarray(a, jnp.float32) for name, a in parts.items() if name in ("bias", field)}
    options = {"out_dtype": "float32", "implementation": backend}
    if with_index:
        w = jax.tree.map(lambda a: jnp.stack([a + 0, a]), w)
        parts = {name: a if name == "residual" else jnp.stack([a, a]) for name, a in parts.items()}
        options["index"] = jnp.int32(1)

    def f(x, a):
        if field in parts:
            return gemv(x, w, **(parts | {field: a}), **options)
        return gemv(x, dataclasses.replace(w, **{field: a}), **parts, **options)

    a = parts.get(field, getattr(w, field, None))
    stacked = jnp.stack([a * (i + 1) if a.dtype == jnp.float32 else a + i for i in range(size)])

    def together(x):
        return jax.vmap(f, (None, 0))(x, stacked)

    def one_by_one(x):
        return jnp.stack([f(x, stacked[i]) for i in range(size)])

    ct = jnp.asarray(rng.standard_normal((size, 5, 12)), jnp.float32)
    for call in (lambda g: jax.jvp(g, (x,), (x + 1,))[1], lambda g: jax.grad(lambda x: (g(x) * ct).sum())(x)):
        found, wanted = call(together), call(one_by_one)
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_weights_on_another_axis(backend, rng):
    problems, x, w, bias = stack_of(rng, 2)
    moved = jax.tree.map(lambda a: np.moveaxis(a, 0, 1), w)
    y = jax.vmap(lambda x, w: gemv_f32(x, w, implementation=backend), (0, 1), 1)(x, moved)
    np.testing.assert_array_equal(y.swapaxes(0, 1), answers(problems) - bias[:, None].astype(float))


def test_nested(backend, rng):
    """vmap of vmap over weights and x in every order."""
    problems, x, w, bias = stack_of(rng, 6)
    x, w, bias = jax.tree.map(lambda a: a.reshape(2, 3, *a.shape[1:]), (x, w, bias))
    expected = answers(problems).reshape(2, 3, *answers(problems).shape[1:])

    def f(x, w, b):
        return gemv_f32(x, w, bias=b, implementation=backend)

    np.testing.assert_array_equal(jax.vmap(jax.vmap(f))(x, w, bias), expected)
    over_rows = jax.vmap(jax.vmap(jax.vmap(f, (0, None, None))))
    np.testing.assert_array_equal(over_rows(x, w, bias), expected)
    weights_inside = jax.vmap(jax.vmap(f, (None, 0, 0)), (0, None, None))
    y = weights_inside(x[:, 0], w_first := jax.tree.map(lambda a: a[0], w), bias[0])
    for i in range(2):
        for j in range(3):
            alone = f(x[i, 0], jax.tree.map(lambda a, j=j: a[j], w_first), bias[0, j])
            np.testing.assert_array_equal(y[i, j], alone)


@pytest.mark.parametrize(
    ("x", "index", "w"),
    [(0, None, None), (None, 0, None), (0, 0, None), (None, None, 0), (0, None, 0), (0, 0, 0)],
)
def test_over_index(backend, x, index, w, rng):
    """An index under vmap, with stacks of stacks too; -1 and 3 stay out of range in each."""
    _, xs, ws, biases = stack_of(rng, 6, case=Case(4, 32, 128, "row", "offset", bias=True))
    indices = np.array([[0, 2, 1, -1], [1, 3, 0, 2]], np.int32)
    ws, biases = jax.tree.map(lambda a: a.reshape(2, 3, *a.shape[1:]), (ws, biases))

    def f(x, index, w, b):
        return gemv_f32(x, w, index=index, bias=b, implementation=backend)

    axes = (x, index, w, w)
    args = [
        a if axis == 0 else jax.tree.map(lambda a: a[0], a)
        for a, axis in zip((xs[:2], indices, ws, biases), axes)
    ]
    y = jax.vmap(f, axes)(*args)
    for i in range(2):
        alone = f(*(jax.tree.map(lambda a: a[i], a) if axis == 0 else a for a, axis in zip(args, axes)))  # noqa: B023
        np.testing.assert_array_equal(y[i], alone)


def test_codebook(rng):
    books = np.array([[-1, 0, 1, 2], [1, 3, 5, 7]], np.float32)
    p = make(rng, 2, "float32", Case(3, 4, 48, 16), exact=True)

    def f(x, codebook):
        return gemv(x, QuantizedTensor(packed=p.packed, scale=p.scale, codebook=codebook, bits=2))

    expected = [f(p.x, book) for book in books]
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(p.x, books), expected)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(p.x, books[1]), expected[1])


def test_int8_x(rng):
    p = make(rng, 4, "float32", Case(3, 4, 48, "row", "integer"), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=None, zero=p.zero, bits=4)
    x = rng.integers(-9, 9, (2, 3, 48)).astype(np.int8)
    expected = [gemv(row, w) for row in x]
    np.testing.assert_array_equal(jax.vmap(lambda x: gemv(x, w))(x), expected)


def test_empty(backend, rng):
    p = make(rng, 4, "float32", CASE)
    y = jax.vmap(lambda x: gemv(x, p.tensor, implementation=backend))(jnp.zeros((0, 5, 72)))
    assert y.shape == (0, 5, 12)
