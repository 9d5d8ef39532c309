"""index: one layer of a stack, or one expert per row, without a slice of the stack."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import assert_ran, by_name, kernels
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv, quantize
from jaxgemv import _ffi as ffi

STACK = 4
CASE = Case(3, 9, 56, 8, "zero", bias=True)
FAST = Case(3, 256, 256, 64, "zero", bias=True)
# So that x may have 16 bits, which fast kernels need, and all is exact still.
gemv_f32 = partial(gemv, out_dtype="float32")


@pytest.fixture(params=[(3, "float32", CASE), (4, "bfloat16", FAST)], ids=["int3", "int4"])
def layers(request, rng):
    """Problems of one shape, and their weights and biases stacked."""
    bits, x, case = request.param
    problems = [make(rng, bits, x, case, exact=True) for _ in range(STACK)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    return problems, w, jnp.stack([p.bias for p in problems])


def product(p, x):
    return np.asarray(x, np.float64) @ p.weight().T


def added(p):
    return np.asarray(p.bias, np.float64)


def test_layer(backend, layers):
    problems, w, biases = layers
    x = problems[0].x
    f = jax.jit(lambda x, w, i, b: gemv_f32(x, w, index=i, bias=b, implementation=backend))
    for i, p in enumerate(problems):
        np.testing.assert_array_equal(f(x, w, i, biases), product(p, x) + added(p))
        # One bias may serve all layers.
        np.testing.assert_array_equal(f(x, w, i, biases[0]), product(p, x) + added(problems[0]))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
def test_experts(backend, layers, dtype):
    problems, w, biases = layers
    index = np.array([2, 0, 2], dtype)
    x = problems[1].x
    y = gemv_f32(x, w, index=index, bias=biases, implementation=backend)
    expected = [product(problems[i], row) + added(problems[i]) for i, row in zip(index, x)]
    np.testing.assert_array_equal(y, expected)


@by_name(
    [k for k in kernels(transposed=False) if k.name == "wgmma_tma" and k.bits == 4 and k.x == "bfloat16"]
)
def test_experts_in_clusters(kernel, rng):
    """CTAs share K, and each finishes some of 19 rows of x; or none, of a matrix that there is not."""
    problems = [
        make(rng, 4, "bfloat16", Case(19, 128, 8192, 128, "zero", bias=True), exact=True) for _ in range(2)
    ]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    biases, x = jnp.stack([p.bias for p in problems]), problems[0].x
    y = gemv_f32(
        jnp.stack([x, x, x]), w, index=np.array([1, 2, 0]), bias=biases, implementation=kernel.backend
    )
    assert_ran(kernel)
    for at, p in ((0, problems[1]), (2, problems[0])):
        np.testing.assert_array_equal(y[at], product(p, x) + added(p))
    assert np.isnan(y[1]).all()


def test_experts_of_several_rows_each(backend, layers, rng):
    """index (2, 2) for x (2, 2, rows, K)"""
    problems, w, _ = layers
    x = rng.integers(-2, 3, (2, 2, 17, problems[0].k)).astype(problems[0].x.dtype)
    index = np.array([[3, 1], [1, 0]], np.int32)
    y = gemv_f32(x, w, index=index, implementation=backend)
    for at in np.ndindex(2, 2):
        np.testing.assert_array_equal(y[at], product(problems[index[at]], x[at]))


def test_out_of_range_gives_nan(backend, layers):
    """And reads nothing, and leaves the other rows alone."""
    for bad in (-1, STACK, 2**31 - 1, -(2**31)):
        check_out_of_range(backend, layers, bad)


def check_out_of_range(backend, layers, bad):
    problems, w, _ = layers
    x = problems[0].x
    y = np.asarray(gemv_f32(x, w, index=np.array([1, bad, 0], np.int32), implementation=backend))
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[0], product(problems[1], x[0]))
    np.testing.assert_array_equal(y[2], product(problems[0], x[2]))
    assert np.isnan(gemv_f32(x, w, index=bad, implementation=backend)).all()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_wide_integers(backend, layers, dtype):
    """2^32 + 1 does not become 1."""
    problems, w, _ = layers
    x = problems[0].x
    bad = 2**32 - 1 if dtype == np.uint32 else 2**32 + 1
    y = np.asarray(gemv_f32(x, w, index=np.array([1, bad, 0], dtype), implementation=backend))
    np.testing.assert_array_equal(y[0], product(problems[1], x[0]))
    np.testing.assert_array_equal(y[2], product(problems[0], x[2]))
    assert np.isnan(y[1]).all()
    assert np.isnan(gemv_f32(x, w, index=int(bad), implementation=backend)).all()


def test_wide_integers_while_tracing(backend, layers):
    problems, w, _ = layers
    jax.config.update("jax_enable_x64", True)
    try:
        index = jnp.array([1, 2**32 + 1, -(2**32)])
        assert index.dtype == jnp.int64
        y = jax.jit(lambda i: gemv_f32(problems[0].x, w, index=i, implementation=backend))(index)
    finally:
        jax.config.update("jax_enable_x64", False)
    np.testing.assert_array_equal(y[0], product(problems[1], problems[0].x[0]))
    assert np.isnan(y[1:]).all()


def test_parameters_of_the_whole_layer(backend, rng):
    """scale (S,) and zero (S, N): nothing broadcasts over the stack by accident."""
    problems = [make(rng, 4, "float32", Case(2, STACK, 24, "tensor"), exact=True) for _ in range(STACK)]
    scale = 2.0 ** np.arange(STACK, dtype=np.float32)
    zero = rng.integers(0, 16, (STACK, STACK)).astype(np.float32)
    w = QuantizedTensor(packed=np.stack([p.packed for p in problems]), scale=scale, zero=zero, bits=4)
    x = problems[0].x
    for i, p in enumerate(problems):
        codes = p.weight() / p.scale + 8
        expected = x @ ((codes - zero[i][:, None]) * scale[i]).T
        np.testing.assert_array_equal(gemv_f32(x, w, index=i, implementation=backend), expected)


def test_bytes_and_one_entry(backend, rng):
    p = make(rng, 5, "float32", CASE._replace(bytes=True), exact=True)
    w = jax.tree.map(lambda a: a[None], p.tensor)
    np.testing.assert_array_equal(gemv_f32(p.x, w, index=0, bias=p.bias, implementation=backend), p.answer())


def test_no_rows(backend, layers):
    problems, w, _ = layers
    x = jnp.zeros((0, problems[0].k), problems[0].x.dtype)
    y = gemv_f32(x, w, index=jnp.zeros(0, jnp.int32), implementation=backend)
    assert y.shape == (0, len(problems[0].packed))


def test_dense(rng):
    w = rng.integers(-3, 4, (STACK, 5, 8)).astype(np.float32)
    bias = rng.integers(-3, 4, (STACK, 5)).astype(np.float32)
    x = rng.integers(-3, 4, (2, 8)).astype(np.float32)
    np.testing.assert_array_equal(gemv(x, w, index=2, bias=bias), x @ w[2].T + bias[2])
    y = gemv(x, w, index=np.array([3, STACK], np.int32), bias=bias)
    np.testing.assert_array_equal(y[0], x[0] @ w[3].T + bias[3])
    assert np.isnan(y[1]).all()


def test_codebook(rng):
    p = make(rng, 2, "float32", Case(3, 4, 48, 16), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=p.scale, codebook=np.float32([-1, 0, 2, 5]), bits=2)
    arrays = {"packed": jnp.stack([p.packed] * 2), "scale": jnp.stack([p.scale, 2 * p.scale])}
    stack = QuantizedTensor(**arrays, codebook=np.stack([w.codebook] * 2), bits=2)
    expected = gemv(p.x, w)
    np.testing.assert_array_equal(gemv(p.x, stack, index=1), 2 * expected)
    y = gemv(p.x, stack, index=np.array([1, 0, 1], np.int32))
    np.testing.assert_array_equal(y, expected * np.array([[2], [1], [2]]))


def test_int8_x_out_of_range(rng):
    """int32 has no NaN; the smallest integer marks the rows."""
    p = make(rng, 4, "float32", Case(2, 4, 48), exact=True)
    w = QuantizedTensor(packed=p.packed[None], scale=None, bits=4)
    y = gemv(p.x.astype(np.int8), w, index=np.array([0, 1], np.int32))
    np.testing.assert_array_equal(y[0], p.x[0] @ (p.weight() / p.scale[:, None]).T)
    assert (np.asarray(y[1]) == np.iinfo(np.int32).min).all()


# Out of range, with parts behind the product


@pytest.mark.parametrize("part", ["global_scale", "bias", "x_scale"])
def test_gradient_of_a_part(part, backend):
    """A row whose index is out of range adds nothing: no NaN, and nothing to the entry that it is clipped to."""
    w = quantize(jnp.ones((3, 4, 32)))
    w = dataclasses.replace(w, global_scale=jnp.ones(3))
    index = jnp.array([1, -1, 7])
    parts = {"bias": jnp.zeros((3, 4)), "x_scale": jnp.ones((3, 1))}
    x = jnp.ones((3, 32), jnp.int8 if part == "x_scale" else jnp.float32)

    def f(a):
        of_w = dataclasses.replace(w, global_scale=a) if part == "global_scale" else w
        rest = {} if part == "global_scale" else {part: a}
        y = gemv(x, of_w, index=index, **rest, implementation=backend)
        return jnp.where(jnp.isnan(y), 0, y).sum()

    a = w.global_scale if part == "global_scale" else parts[part]
    gradient = np.asarray(jax.grad(f)(a)).reshape(3, -1)
    expected = np.zeros_like(gradient)
    # Each of 4 weights of a row is 1, of 32 inputs.
    expected[0 if part == "x_scale" else 1] = 1 if part == "bias" else 128
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_empty_stack(backend):
    """There is nothing in range."""
    w = quantize(jnp.ones((3, 4, 32)))[:0]
    assert np.isnan(gemv(jnp.ones((2, 32)), w, index=0, implementation=backend)).all()
    assert jax.vmap(partial(gemv, implementation=backend), (None, 0))(jnp.ones(32), w).shape == (0, 4)


@pytest.mark.parametrize("name", ["norm", "scale", "global_scale", "perm"])
def test_gradient_beside_arrays_of_numpy(name, backend, rng):
    """Differentiated from outside of a jit that closes over them."""
    w = jax.tree.map(np.asarray, quantize(rng.standard_normal((3, 4, 32)).astype(np.float32)))
    w = dataclasses.replace(w, global_scale=np.ones(3, np.float32))
    w = dataclasses.replace(w, perm=np.tile(np.arange(32)[::-1], (3, 1))) if name == "perm" else w
    norm = {"norm": np.ones((3, 32), np.float32)} if name == "norm" else {}
    index = jnp.array([0, 2])
    f = jax.jit(lambda x: gemv(x, w, index=index, **norm, implementation=backend).sum())
    assert np.isfinite(jax.grad(f)(jnp.ones((2, 32)))).all()


def test_dequantize_out_of_range_in_an_order(rng):
    """Columns of no entry have no place to go to, and are NaN all the same."""
    perm = np.stack([rng.permutation(64) for _ in range(2)]).astype(np.int32)
    w = QuantizedTensor.from_codes(rng.integers(0, 16, (2, 8, 64)), np.ones(2, np.float32), bits=4, perm=perm)
    dense = jax.jit(lambda i: w[i].dequantize())
    np.testing.assert_array_equal(dense(1), w.dequantize()[1])
    assert np.isnan(dense(2)).all()


@pytest.mark.parametrize(
    "part", [{}, {"norm": np.ones((0, 64), np.float32)}, {"activation": "silu"}], ids=list
)
def test_stack_of_nothing_in_an_order(part, rng):
    perm = np.tile(np.arange(64, dtype=np.int32), (2, 1))
    w = QuantizedTensor.from_codes(rng.integers(0, 16, (2, 8, 64)), np.ones(2, np.float32), bits=4, perm=perm)
    product = jax.jit(partial(gemv, **part))
    x, index = np.ones((3, 64), np.float32), np.zeros(3, np.int32)
    assert np.isnan(product(x, w[:0], index=index)).all()
    assert ffi.TARGET not in product.lower(x, w[:0], index=index).as_text()  # kernels would read an entry
