"""What products must be, through whichever kernel is chosen: dtypes, ranks, special values; against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import products
from problems import Case, make
from tolerance import assert_close

import jaxgemv
from jaxgemv import gemv, reference

CASE = Case(1, 40, 512, 128, "zero")


def test_jnp_dot(backend, rng):
    p = make(rng, 4, "bfloat16", CASE)
    weight = jaxgemv.dequantize(p.tensor, jnp.float32)
    dot = jnp.dot(jnp.asarray(p.x, jnp.float32), weight.T, precision="highest")
    y = gemv(p.x, p.tensor, out_dtype=jnp.float32, implementation=backend)
    assert_close(y, np.asarray(dot, np.float64), p.magnitude(), p.k, dtype=jnp.float32, factor=2)


def test_dtypes(backend, rng):
    """Accumulates in float32 and rounds once, whatever x and the scales are: models mix them."""
    floats = ["float16", "bfloat16", "float32"]
    problems = [
        make(rng, 4, x, Case(3, 67, 256, 64, "offset", bias=True, scale=scale))
        for x in floats
        for scale in floats
    ]

    @jax.jit
    def f(args):
        return [
            [gemv(x, w, bias=b, out_dtype=out, implementation=backend) for out in (*floats, None)]
            for x, w, b in args
        ]

    for p, ys in zip(problems, f([(p.x, p.tensor, p.bias) for p in problems])):
        for out, y in zip((*floats, p.x.dtype), ys):
            assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.dtype(out))


@pytest.mark.parametrize("bits", range(1, 9))
def test_gemv_int(bits, backend, rng):
    """gemv_int1 .. gemv_int8 are gemv with the arrays given one by one."""
    p = make(rng, bits, "float32", Case(2, 9, 50, 16, "zero", bias=True), exact=True)
    function = getattr(jaxgemv, f"gemv_int{bits}")
    y = function(p.x, p.packed, p.zero, p.scale, bias=p.bias, group_size=16, implementation=backend)
    np.testing.assert_array_equal(y, p.answer())
    assert function.__name__ == f"gemv_int{bits}"


def test_reference_gemv(rng):
    p = make(rng, 3, "float32", Case(3, 67, 200, 40, "offset", bias=True), exact=True)
    np.testing.assert_array_equal(reference.gemv(p.x, p.tensor, bias=p.bias), p.answer())


def test_repeatable(backend, rng):
    """Reductions have a fixed order: the same bits on every run."""
    p = make(rng, 4, "bfloat16", Case(3, 257, 4096, 128, "zero"))
    first, *others = (
        np.asarray(gemv(p.x, p.tensor, out_dtype="float32", implementation=backend)) for _ in range(5)
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_rows_agree(backend, rng):
    """Each row of x gets its own answer, whichever rows share a call."""
    p = make(rng, 4, "float32", Case(17, 40, 256, 64, "zero"), exact=True)
    together = gemv(p.x, p.tensor, implementation=backend)
    alone = [gemv(row, p.tensor, implementation=backend) for row in (p.x[0], p.x[16])]
    np.testing.assert_array_equal(together[jnp.array([0, 16])], jnp.stack(alone))


@pytest.mark.parametrize(
    ("bits", "rows", "x"),
    [(4, 3, "float32"), (4, 3, "bfloat16"), (2, 8, "float16"), (8, 16, "float16"), (4, 33, "bfloat16")],
)
def test_nan_and_inf_stay_in_their_row(backend, bits, rows, x, rng):
    p = make(rng, bits, x, Case(rows, 256, 512, 128, "zero"), exact=True)
    values = p.x.copy()
    values[1, 5] = np.nan
    values[2, 7] = np.inf
    y = np.asarray(gemv(values, p.tensor, implementation=backend, out_dtype="float32"))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, [1, 2], 0), np.delete(p.answer(), [1, 2], 0))


def test_nan_in_one_of_two_rows(backend, rng):
    """So few have kernels of their own."""
    for x in ("float32", "bfloat16"):
        p = make(rng, 4, x, Case(2, 48, 512, 128, "zero"), exact=True)
        values = p.x.copy()
        values[1, 5] = np.nan
        y = np.asarray(gemv(values, p.tensor, implementation=backend, out_dtype="float32"))
        assert np.isnan(y[1]).all()
        np.testing.assert_array_equal(y[0], p.answer()[0])


@pytest.mark.parametrize("x", ["float16", "bfloat16"])
def test_outliers(backend, x, rng):
    """Activations of language models have elements a thousand times as large as the rest."""
    shapes = [(rows, form) for rows in (1, 2, 8, 16, 33) for form in ("mid", "offset")]
    problems = []
    for rows, form in shapes:
        p = make(rng, 4, x, Case(rows, 256, 1024, 128, form))
        values = p.x.copy()
        values[:, ::97] *= 2**10
        problems.append(dataclasses.replace(p, x=values))
    ys = products([(p.x, p.tensor, None) for p in problems], backend)
    for (rows, _), p, y in zip(shapes, problems, ys):
        # Tensor cores add 16 products at a time by cutting all of them to the unit of the largest: always downwards.
        cuts = backend == "cuda" and rows > 2
        assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, worst=cuts)


@pytest.mark.parametrize("scale", [None, "float32"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_int8_x(scale, implementation, rng):
    """Integer activations: the exact int32 sum, or that times scale."""
    p = make(rng, 4, "float32", Case(2, 7, 70, "row", "integer"), exact=True)
    x = rng.integers(-128, 128, p.x.shape).astype(np.int8)
    shift = x.astype(np.int64) @ (np.broadcast_to(p.zero[:, None], (7, 70))).T
    codes = np.asarray(jaxgemv.unpack(p.packed, 4, 70)).astype(np.int64)
    expected = x.astype(np.int64) @ codes.T - shift
    y = jaxgemv.gemv_int4(x, p.packed, p.zero, scale and p.scale, implementation=implementation)
    assert y.dtype == (jnp.float32 if scale else jnp.int32)
    np.testing.assert_array_equal(y, expected * p.scale if scale else expected)


@pytest.mark.parametrize("groups", [None, 4])
def test_codebook(groups, rng):
    codebook = np.array([-1, -0.5, 0.25, 1], np.float32)
    p = make(rng, 2, "float32", Case(3, 6, 64, groups or "row"), exact=True)
    w = jaxgemv.QuantizedTensor(packed=p.packed, scale=p.scale, codebook=codebook, bits=2)
    codes = np.asarray(jaxgemv.unpack(p.packed, 2, 64))
    weight = codebook[codes] * (np.repeat(p.scale, groups, 1) if groups else p.scale[:, None])
    np.testing.assert_array_equal(w.dequantize(), weight)
    np.testing.assert_array_equal(gemv(p.x, w), p.x @ weight.T)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dense(dtype, rng):
    """A model half quantised calls one function for all its layers."""
    x, w = (rng.integers(-4, 5, shape).astype(jnp.dtype(dtype)) for shape in ((3, 20), (6, 20)))
    y = gemv(x, w)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32) @ w.astype(np.float32).T)


def test_python_numbers(rng):
    """zero and scale of the whole tensor may be plain numbers."""
    p = make(rng, 4, "float32", Case(1, 5, 24, "tensor"), exact=True)
    y = jaxgemv.gemv_int4(p.x, p.packed, 8, 0.5)
    np.testing.assert_array_equal(y, p.x @ ((np.asarray(jaxgemv.unpack(p.packed, 4, 24)) - 8.0) * 0.5).T)


def test_jax_arrays_and_ranks(backend, rng):
    """x of any rank, leaves of any kind."""
    p = make(rng, 4, "float32", Case(12, 10, 64, 32, "zero"), exact=True)
    w = jax.tree.map(jnp.asarray, p.tensor)
    for shape in ((12, 64), (2, 6, 64), (2, 1, 3, 2, 64)):
        y = gemv(jnp.asarray(p.x).reshape(shape), w, implementation=backend)
        np.testing.assert_array_equal(y, p.answer().reshape(*shape[:-1], 10))
