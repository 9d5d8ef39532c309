"""The transposed product, dy @ W, which gradients with respect to x are: every kernel and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from tolerance import assert_close

from jaxgemv import QuantizedTensor, gemv

MAX_ROWS = 64


def transposed(ct, w, k: int, implementation, *, out="float32", index=None):
    """What `ct`, a cotangent of gemv's result, makes of x: one transposed product."""
    ct = jnp.asarray(ct)
    x = jax.ShapeDtypeStruct((*ct.shape[:-1], k), jnp.dtype(out))
    f = jax.linear_transpose(
        lambda x: gemv(x, w, index=index, out_dtype=ct.dtype, implementation=implementation), x
    )
    return f(ct)[0]


def problem(rng, bits: int, dtype: str, case: Case, *, exact: bool = False):
    """A weight, and a cotangent to multiply it with."""
    p = make(rng, bits, dtype, case, exact=exact)
    shape = case.m, case.n
    ct = rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)
    return p, np.asarray(ct).astype(jnp.dtype(dtype))


def answer(p, ct):
    return np.asarray(ct, np.float64) @ p.weight()


# Tails of both dimensions, all layouts of the parameters and forms of the affine part, several tiles of each dimension,
# groups that begin in the middle of a tile or of a block of codes.
CASES = (
    Case(1, 40, 512, 128, "zero"),
    Case(3, 67, 200, 40, "offset"),
    Case(8, 24, 96, "row", "mid", bytes=True),
    Case(5, 33, 77, 16, "fraction"),
    Case(2, 48, 256, 32, "integer"),
    Case(1, 1, 1, "tensor", "mid"),
    Case(4, 9, 1, "row", "offset"),
    Case(2, 6, 7, "row", "fraction"),
    Case(1, 5, 8, 1, "zero"),
    Case(1, 700, 1061, 96, "zero"),
    Case(2, 150, 2081, 384, "offset"),
    Case(17, 301, 530, 33, "integer", bytes=True),
    Case(9, 66, 264, 1000, "zero"),
    Case(0, 8, 64, 32, "zero"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.numerics
def test_exact(transposed_kernel, case, rng):
    """Every bit of every code counts."""
    p, ct = problem(rng, transposed_kernel.bits, transposed_kernel.x, case, exact=True)
    y = transposed(ct, p.tensor, p.k, transposed_kernel.backend)
    np.testing.assert_array_equal(y, answer(p, ct))


@pytest.mark.parametrize("case", [Case(1, 1030, 300, 128, "zero"), Case(6, 130, 77, 11, "offset")], ids=str)
@pytest.mark.numerics
def test_float64(transposed_kernel, case, rng):
    p, ct = problem(rng, transposed_kernel.bits, transposed_kernel.x, case)
    y = transposed(ct, p.tensor, p.k, transposed_kernel.backend)
    magnitude = np.abs(np.asarray(ct, np.float64)) @ p.weight_magnitude()
    assert_close(y, answer(p, ct), magnitude, case.n, dtype=jnp.float32)


@pytest.mark.parametrize("ct_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
def test_dtypes(backend, ct_dtype, out, rng):
    """Sums in float32, rounded once to x's dtype."""
    p, ct = problem(rng, 4, ct_dtype, Case(3, 150, 80, 16, "zero"))
    y = transposed(ct, p.tensor, p.k, backend, out=out)
    magnitude = np.abs(np.asarray(ct, np.float64)) @ p.weight_magnitude()
    assert_close(y, answer(p, ct), magnitude, 150, dtype=jnp.dtype(out))


@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32"])
def test_scale_dtypes(backend, scale, rng):
    p = make(rng, 4, "bfloat16", Case(2, 60, 256, 64, "zero"), exact=True, scale_dtype=scale)
    ct = rng.integers(-2, 3, (2, 60)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(transposed(ct, p.tensor, p.k, backend), answer(p, ct))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 65, 130])
@pytest.mark.parametrize(("bits", "x"), [(4, "bfloat16"), (8, "float16"), (3, "float32")])
def test_rows(backend, m, bits, x, rng):
    p, ct = problem(rng, bits, x, Case(m, 70, 384, 128, "zero"), exact=True)
    np.testing.assert_array_equal(transposed(ct, p.tensor, p.k, backend), answer(p, ct))


@pytest.mark.parametrize("m", [1, MAX_ROWS, MAX_ROWS + 1])
def test_rows_of_the_default(m, rng):
    """Many go to XLA's matmul."""
    p, ct = problem(rng, 4, "float32", Case(m, 20, 256, 64, "offset"), exact=True)
    np.testing.assert_array_equal(transposed(ct, p.tensor, p.k, None), answer(p, ct))


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, "row", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 2048), (4, 260, 1280), (16, 129, 1536)])
@pytest.mark.parametrize("x", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.numerics
def test_whole_groups(backend, bits, group, m, n, k, x, rng):
    """What models have."""
    form = {1: "mid", 4: "zero", 16: "offset"}[m]
    p, ct = problem(rng, bits, x, Case(m, n, k, group, form), exact=True)
    np.testing.assert_array_equal(transposed(ct, p.tensor, p.k, backend), answer(p, ct))


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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [2, 3, 16])
def test_nan_and_inf_stay_in_their_row(backend, rows, x, bad, rng):
    p, ct = problem(rng, 4, x, Case(rows, 131, 512, 128, "zero"), exact=True)
    values = ct.copy()
    values[1, 130] = bad
    y = np.asarray(transposed(values, p.tensor, p.k, backend))
    assert np.isnan(y[1]).all() if np.isnan(bad) else not np.isfinite(y[1]).any()
    np.testing.assert_array_equal(np.delete(y, 1, 0), np.delete(answer(p, ct), 1, 0))


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


@pytest.mark.parametrize("start", [1, 3])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
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


@pytest.fixture(params=[3, 4])
def layers(request, rng):
    """Four problems of one shape, and their weights stacked."""
    case = Case(3, 40, 56, 8, "zero")
    problems = [make(rng, request.param, "float32", case, exact=True) for _ in range(4)]
    return problems, jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))


def test_layer(backend, layers, rng):
    problems, w = layers
    ct = rng.integers(-2, 3, (3, 40)).astype(np.float32)
    f = jax.jit(lambda ct, w, i: transposed(ct, w, 56, backend, index=i))
    for i, p in enumerate(problems):
        np.testing.assert_array_equal(f(ct, w, i), answer(p, ct))


def test_experts(backend, layers, rng):
    """An index out of range gives NaN, which does not depend on x: no gradient."""
    problems, w = layers
    ct = rng.integers(-2, 3, (2, 2, 3, 40)).astype(np.float32)
    index = np.array([[3, 1], [-1, 4]], np.int32)
    y = transposed(ct, w, 56, backend, index=index)
    for at in ((0, 0), (0, 1)):
        np.testing.assert_array_equal(y[at], answer(problems[index[at]], ct[at]))
    np.testing.assert_array_equal(y[1], np.zeros_like(y[1]))


def test_vmap(backend, layers, rng):
    """Over the cotangent, over the weights, over both, and over an index."""
    problems, w = layers
    cts = rng.integers(-2, 3, (4, 3, 40)).astype(np.float32)

    def f(ct, w):
        return transposed(ct, w, 56, backend)

    pairs = [[answer(p, ct) for p in problems] for ct in cts]
    first = jax.tree.map(lambda a: a[0], w)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(cts, first), [row[0] for row in pairs])
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(cts[1], w), pairs[1])
    np.testing.assert_array_equal(jax.vmap(f)(cts, w), [pairs[i][i] for i in range(4)])
    nested = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(cts, w)
    np.testing.assert_array_equal(nested, pairs)
    index = np.array([2, 0, 3, 3], np.int32)
    y = jax.vmap(lambda ct, i: transposed(ct, w, 56, backend, index=i))(cts, index)
    np.testing.assert_array_equal(y, [pairs[i][j] for i, j in enumerate(index)])


def test_vmap_over_one_array(backend, layers, rng):
    """The arrays that are not mapped serve every entry."""
    problems, w = layers
    ct = rng.integers(-2, 3, (3, 40)).astype(np.float32)

    def f(scale):
        p = problems[0]
        arrays = {"packed": p.packed, "zero": p.zero, "scale": scale}
        return transposed(ct, QuantizedTensor(**arrays, bits=p.bits, k=p.tensor.k), 56, backend)

    np.testing.assert_array_equal(jax.vmap(f)(w.scale), [f(scale) for scale in w.scale])


def test_empty(backend, rng):
    p = make(rng, 4, "float32", Case(1, 12, 64, 32, "zero"))
    y = jax.vmap(lambda ct: transposed(ct, p.tensor, 64, backend))(jnp.zeros((0, 5, 12)))
    assert y.shape == (0, 5, 64)


def test_codebook(rng):
    """Without a kernel: the reference."""
    book = np.arange(4, dtype=np.float32) - 2
    p, ct = problem(rng, 2, "float32", Case(3, 6, 64, 16), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=p.scale, codebook=book, bits=2)
    np.testing.assert_array_equal(transposed(ct, w, 64, None), answer(p, ct))
