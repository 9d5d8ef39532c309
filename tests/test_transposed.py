"""The transposed product, dy @ W, which gradients with respect to x are; test_kernels.py has its shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import compiled, transposed, transposed_products
from problems import Case, make
from tolerance import assert_close

from jaxgemv import QuantizedTensor
from jaxgemv._ffi import backends


def problem(rng, bits: int, dtype: str, case: Case, *, exact: bool = False):
    """A weight, and a cotangent to multiply it with."""
    p = make(rng, bits, dtype, case, exact=exact)
    shape = case.m, case.n
    ct = rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)
    return p, np.asarray(ct).astype(jnp.dtype(dtype))


def answer(p, ct):
    return np.asarray(ct, np.float64) @ p.weight()


def test_dtypes(backend, rng):
    """Sums in float32, rounded once to x's dtype."""
    floats = ["float16", "bfloat16", "float32"]
    problems = [problem(rng, 4, x, Case(3, 150, 80, 16, "zero")) for x in floats]

    @jax.jit
    def f(problems):
        return [[transposed(ct, w, 80, backend, out=out) for out in floats] for w, ct in problems]

    for (p, ct), ys in zip(problems, f([(p.tensor, ct) for p, ct in problems])):
        magnitude = np.abs(np.asarray(ct, np.float64)) @ p.weight_magnitude()
        for y, out in zip(ys, floats):
            assert_close(y, answer(p, ct), magnitude, 150, dtype=jnp.dtype(out))


@compiled
@pytest.mark.parametrize(("bits", "x"), [(4, "bfloat16"), (8, "float16"), (3, "float32")])
def test_rows(backend, bits, x, rng):
    """Any number of them, through whichever kernels there are for so many."""
    rows = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 130)
    problems = [problem(rng, bits, x, Case(m, 70, 384, 128, "zero"), exact=True) for m in rows]
    ys = transposed_products([(ct, p.tensor) for p, ct in problems], (384,) * len(rows), backend)
    for y, (p, ct) in zip(ys, problems):
        np.testing.assert_array_equal(y, answer(p, ct))


def test_rows_of_the_default(rng):
    """Many go to XLA's matmul."""
    for m in (1, backends["cpu"].gradient_rows + 1):
        p, ct = problem(rng, 4, "float32", Case(m, 20, 256, 64, "offset"), exact=True)
        np.testing.assert_array_equal(transposed(ct, p.tensor, p.k, None), answer(p, ct))


def test_repeatable(backend, rng):
    """Sums have a fixed order: the same bits on every run."""
    p, ct = problem(rng, 4, "bfloat16", Case(3, 4096, 257, 128, "zero"))
    first, *others = (np.asarray(transposed(ct, p.tensor, p.k, backend)) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_rows_agree(backend, rng):
    p, ct = problem(rng, 4, "float32", Case(17, 256, 40, 8, "zero"), exact=True)
    together = transposed(ct, p.tensor, p.k, backend)
    alone = [transposed(row, p.tensor, p.k, backend) for row in (ct[0], ct[16])]
    np.testing.assert_array_equal(together[jnp.array([0, 16])], jnp.stack(alone))


@pytest.mark.parametrize(("rows", "x"), [(3, "float32"), (5, "bfloat16"), (16, "float16"), (33, "bfloat16")])
def test_nan_and_inf_stay_in_their_row(backend, rows, x, rng):
    p, ct = problem(rng, 4, x, Case(rows, 131, 512, 128, "zero"), exact=True)
    values = ct.copy()
    values[1, 130] = np.nan
    values[2, 130] = np.inf
    y = np.asarray(transposed(values, p.tensor, p.k, backend))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, [1, 2], 0), np.delete(answer(p, ct), [1, 2], 0))


def test_infinite_scale_stays_in_its_group(backend, rng):
    """Nor does padding of rows or codes touch one."""
    p, ct = problem(rng, 4, "float32", Case(2, 33, 90, 30, "zero"), exact=True)
    scale = p.scale.copy()
    scale[32, 2] = np.inf
    w = QuantizedTensor(packed=p.packed, scale=scale, zero=p.zero, bits=4, group_size=30, k=90)
    ct[:, 32] = 1
    y = np.asarray(transposed(ct, w, 90, backend))
    np.testing.assert_array_equal(y[:, :60], answer(p, ct)[:, :60])
    assert not np.isfinite(y[:, 60:]).any()


@pytest.mark.parametrize(("start", "x"), [(1, "bfloat16"), (3, "float32")])
def test_views_at_odd_offsets(backend, x, start, rng):
    p, ct = problem(rng, 4, x, Case(5, 12, 128, 32, "zero"), exact=True)
    spare_ct = jnp.concatenate([jnp.zeros(start, x), ct.reshape(-1)])
    spare_w = jnp.concatenate([jnp.zeros(start, jnp.uint8), p.packed.view(np.uint8).reshape(-1)])

    @jax.jit
    def f(spare_ct, spare_w, scale, zero):
        w = QuantizedTensor(packed=spare_w[start:].reshape(12, -1), scale=scale, zero=zero, bits=4)
        return transposed(spare_ct[start:].reshape(5, 12), w, 128, backend)

    np.testing.assert_array_equal(f(spare_ct, spare_w, p.scale, p.zero), answer(p, ct))


def test_donated(backend, rng):
    """The result may take the cotangent's memory only if nobody still reads it there, or it is refused."""
    p, ct = problem(rng, 4, "float32", Case(8, 64, 64, 32, "zero"), exact=True)
    w = p.tensor
    f = jax.jit(lambda ct, w: transposed(ct, w, 64, backend), donate_argnums=0)
    np.testing.assert_array_equal(f(jnp.array(ct), w), answer(p, ct))
    f = jax.jit(lambda ct, w: ct.at[:4].set(transposed(ct[:4], w, 64, backend)), donate_argnums=0)
    try:
        y = jax.block_until_ready(f(jnp.array(ct), w))
    except jax.errors.JaxRuntimeError as error:
        assert "share memory" in str(error)  # noqa: PT017  either outcome is fine
    else:
        np.testing.assert_array_equal(y, np.concatenate([answer(p, ct)[:4], ct[4:]]))


@pytest.fixture(
    params=[(3, "float32", Case(3, 40, 56, 8, "zero")), (4, "bfloat16", Case(3, 40, 256, 64, "zero"))]
)
def layers(request, rng):
    """Four problems of one shape, and their weights stacked."""
    bits, x, case = request.param
    problems = [make(rng, bits, x, case, exact=True) for _ in range(4)]
    return problems, jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))


def test_layer(backend, layers, rng):
    problems, w = layers
    ct = rng.integers(-2, 3, (3, 40)).astype(problems[0].x.dtype)
    f = jax.jit(lambda ct, w, i: transposed(ct, w, problems[0].k, backend, index=i))
    for i, p in enumerate(problems):
        np.testing.assert_array_equal(f(ct, w, i), answer(p, ct))


def test_experts(backend, layers, rng):
    """An index out of range gives NaN, which does not depend on x: no gradient."""
    problems, w = layers
    ct = rng.integers(-2, 3, (2, 2, 3, 40)).astype(problems[0].x.dtype)
    index = np.array([[3, 1], [-1, 4]], np.int32)
    y = transposed(ct, w, problems[0].k, backend, index=index)
    for at in ((0, 0), (0, 1)):
        np.testing.assert_array_equal(y[at], answer(problems[index[at]], ct[at]))
    np.testing.assert_array_equal(y[1], np.zeros_like(y[1]))


def test_vmap(backend, layers, rng):
    """Over the cotangent, over the weights, over both, and over an index."""
    problems, w = layers
    cts = rng.integers(-2, 3, (4, 3, 40)).astype(problems[0].x.dtype)

    def f(ct, w):
        return transposed(ct, w, problems[0].k, backend)

    pairs = [[answer(p, ct) for p in problems] for ct in cts]
    first = jax.tree.map(lambda a: a[0], w)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(cts, first), [row[0] for row in pairs])
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(cts[1], w), pairs[1])
    np.testing.assert_array_equal(jax.vmap(f)(cts, w), [pairs[i][i] for i in range(4)])
    nested = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(cts, w)
    np.testing.assert_array_equal(nested, pairs)
    index = np.array([2, 0, 3, 3], np.int32)
    y = jax.vmap(lambda ct, i: transposed(ct, w, problems[0].k, backend, index=i))(cts, index)
    np.testing.assert_array_equal(y, [pairs[i][j] for i, j in enumerate(index)])


def test_vmap_over_one_array(backend, layers, rng):
    """The arrays that are not mapped serve every entry."""
    problems, w = layers
    ct = rng.integers(-2, 3, (3, 40)).astype(problems[0].x.dtype)

    def f(scale):
        p = problems[0]
        arrays = {"packed": p.packed, "zero": p.zero, "scale": scale}
        return transposed(ct, QuantizedTensor(**arrays, bits=p.bits, k=p.tensor.k), p.k, backend)

    np.testing.assert_array_equal(jax.vmap(f)(w.scale), [f(scale) for scale in w.scale])


def test_empty(backend, rng):
    p = make(rng, 4, "float32", Case(1, 12, 64, 32, "zero"))
    y = jax.vmap(lambda ct: transposed(ct, p.tensor, 64, backend))(jnp.zeros((0, 5, 12)))
    assert y.shape == (0, 5, 64)


def test_codebook(rng):
    book = np.arange(4, dtype=np.float32) - 2
    p, ct = problem(rng, 2, "float32", Case(3, 6, 64, 16), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=p.scale, codebook=book, bits=2)
    np.testing.assert_array_equal(transposed(ct, w, 64, None), answer(p, ct))


@pytest.mark.parametrize("entry", [np.inf, np.nan])
def test_infinite_entry_that_no_code_has(backend, entry, rng):
    """What stands in the place of rows and codes that are not there has code 0."""
    for bits, n, group in [(2, 33, 30), (3, 5, 32), (4, 6, 64), (4, 70, 16), (8, 5, 90)]:
        codes = rng.integers(1, 1 << bits, (n, 90))
        book = np.arange(1 << bits, dtype=np.float32)
        scale = np.ones((n, -(-90 // group)), np.float32)
        w = QuantizedTensor.from_codes(codes, scale, codebook=book, bits=bits, group_size=group)
        book[0] = entry
        w = dataclasses.replace(w, codebook=book)
        ct = rng.integers(-3, 4, (2, n)).astype(np.float32)
        np.testing.assert_array_equal(transposed(ct, w, 90, backend), ct @ codes)
