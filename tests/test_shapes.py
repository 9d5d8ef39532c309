"""The shapes that break naive kernels, through every kernel and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv

CASES = (
    Case(1, 1, 1, "tensor", "mid"),
    Case(1, 1, 4099, 100, "zero"),  # one output
    Case(4, 9, 1, "row", "offset", bias=True),  # one input
    Case(2, 6, 7, "row", "fraction"),  # less than an octet
    Case(1, 5, 8, 1, "zero"),  # a scale for each code
    Case(3, 17, 33, 5, "offset", bytes=True),  # ragged groups across words
    Case(7, 31, 130, 64, "mid", bias=True),
    Case(9, 66, 264, 1000, "zero"),  # the group is longer than the row
    Case(1, 130, 999, 27, "integer"),
    Case(0, 8, 64, 32, "zero"),  # no rows at all
)
ROWS = (1, 2, 7, 16, 17, 64, 65)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.numerics
def test_awkward(kernel, case, rng):
    p = make(rng, kernel.bits, kernel.x, case, exact=True)
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=kernel.backend)
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("bits", "x"), [(4, "bfloat16"), (4, "float32"), (8, "float16"), (3, "float32")])
def test_rows(backend, m, bits, x, rng):
    p = make(rng, bits, x, Case(m, 50, 384, 128, "zero"), exact=True)
    y = gemv(p.x, p.tensor, out_dtype="float32", implementation=backend)
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("m", ROWS)
def test_rows_of_the_default(m, rng):
    """With implementation=None too, where many rows go to XLA's matmul."""
    p = make(rng, 4, "float32", Case(m, 20, 256, 64, "offset"), exact=True)
    np.testing.assert_array_equal(gemv(p.x, p.tensor), p.answer())


@pytest.mark.parametrize("group", [32, 64, 128, 256, "row", "tensor"])
@pytest.mark.parametrize(("m", "n"), [(1, 16), (1, 40), (8, 33), (17, 129), (65, 16)])
@pytest.mark.parametrize("x", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.numerics
def test_whole_groups(backend, bits, group, m, n, x, rng):
    """What models have: K a multiple of 128 or of 512, the usual groups, and N with and without a tail."""
    if backend == "xla":
        m = min(m, 8)
    form = {1: "mid", 8: "zero", 17: "offset", 65: "zero"}[m]
    k = 1280 if n == 40 else 1536
    p = make(rng, bits, x, Case(m, n, k, group, form, bias=n == 40), exact=True)
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=backend)
    np.testing.assert_array_equal(y, p.answer())


# M, N, K, group: more tiles than SMs, several slices of K, more rows than shared memory has room for at once, ragged
# ends of N and K, each with the kernel for its M.
LARGE = (
    (1, 2500, 9216, 128),
    (1, 4099, 20544, 64),
    (1, 33, 40960, 32),
    (1, 5000, 4224, "row"),
    (3, 2121, 12416, 128),
    (8, 40000, 4096, 128),
    (5, 3000, 8192, "row"),
    (8, 17, 640, 64),
    (16, 2500, 4608, 128),
    (17, 300, 4096, 128),
    (33, 4100, 2048, "row"),
    (64, 1028, 14336, 128),
)


@pytest.mark.cuda
@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("x", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_large(bits, x, case):
    """Against XLA's matmul on the same device; all values are exact, so the results are equal."""
    m, n, k, group = case
    with jax.default_device(jax.devices("cuda")[0]):
        keys = jax.random.split(jax.random.key(k + m), 4)
        shape = (n,) if group == "row" else (n, k // group)
        w = QuantizedTensor(
            packed=jax.random.bits(keys[0], (n, k * bits // 32), "uint32"),
            scale=2.0 ** jax.random.randint(keys[1], shape, -1, 1).astype(x),
            zero=jax.random.randint(keys[2], shape, 0, 1 << bits).astype(x),
            bits=bits,
        )
        rows = jax.random.randint(keys[3], (m, k), -2, 3).astype(x)
        y = gemv(rows, w, out_dtype="float32", implementation="cuda")
        again = gemv(rows, w, out_dtype="float32", implementation="cuda")
        exact = jnp.dot(rows.astype("float32"), w.dequantize("float32").T, precision="highest")
    np.testing.assert_array_equal(y, exact)
    np.testing.assert_array_equal(y, again)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("m", [1, 8, 17])
def test_what_the_last_kernel_left(bits, group, m, rng):
    """Shared memory full of NaN scales must not reach a row that ends before a warp's share of it does."""
    with jax.default_device(jax.devices("cuda")[0]):
        full = make(rng, bits, "bfloat16", Case(m, 4096, 2048, group, "zero"))
        nan = jnp.full(full.scale.shape, jnp.nan, "bfloat16")
        stale = QuantizedTensor(packed=full.packed, scale=nan, zero=nan, bits=bits)
        assert jnp.isnan(gemv(full.x, stale, implementation="cuda")).all()
        p = make(rng, bits, "bfloat16", Case(m, 40, 1280, group, "mid"), exact=True)
        y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cuda")
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("groups", [(None, 4), (4, None), (0, 4), (4, 0)])
def test_scale_and_zero_of_different_shapes(backend, groups, rng):
    """scale per row with zero per group, and the like; 0 stands for shape (), None for (N,)."""
    shapes = [{0: (), None: (6,)}.get(g, (6, g)) for g in groups]
    p = make(rng, 4, "float32", Case(3, 6, 64, 16, "mid"), exact=True)
    scale = 2.0 ** rng.integers(-1, 2, shapes[0])
    zero = rng.integers(0, 16, shapes[1])
    w = jnp.asarray(p.packed)
    y = gemv(
        p.x, p.tensor.__class__(packed=w, scale=jnp.float32(scale), zero=zero, bits=4), implementation=backend
    )
    codes = p.weight() / np.repeat(p.scale, 16, 1) + 8
    wide = [np.repeat(a, 16, 1) if a.ndim == 2 else a.reshape(-1, 1) for a in map(np.asarray, (scale, zero))]
    np.testing.assert_array_equal(y, p.x @ ((codes - wide[1]) * wide[0]).T)


@pytest.mark.parametrize("m", [1, 2, 5, 40])
@pytest.mark.parametrize(("bits", "x"), [(2, "bfloat16"), (4, "float16"), (4, "float32"), (8, "bfloat16")])
@pytest.mark.parametrize("start", [1, 3])
def test_views_at_odd_offsets(backend, m, bits, x, start, rng):
    """XLA passes slices without a copy where it can, on GPUs those of whole 128 bytes: x, Wq and scale may start
    anywhere. The shapes suit the fast kernels, so that nothing else is in their way."""
    p = make(rng, bits, x, Case(m, 128, 512, 128, "zero"), exact=True)
    packed = p.packed.view(np.uint8)

    def spare(a):
        return jnp.concatenate([jnp.zeros(start, a.dtype), a.reshape(-1)])

    @jax.jit
    def f(x, bytes_, scale, zero):
        w = QuantizedTensor(
            packed=bytes_[start:].reshape(packed.shape),
            scale=scale[start:].reshape(p.scale.shape),
            zero=zero,
            bits=bits,
        )
        return gemv(x[start:].reshape(p.x.shape), w, out_dtype="float32", implementation=backend)

    np.testing.assert_array_equal(f(spare(p.x), spare(packed), spare(p.scale), p.zero), p.answer())


@pytest.mark.parametrize("start", [1, 2, 5])
def test_rows_of_a_larger_matrix(backend, start, rng):
    """A row slice of every array, and of x, as pipelines make them."""
    p = make(rng, 3, "float32", Case(8, 21, 72, 24, "offset"), exact=True)

    @jax.jit
    def f(x, w):
        return gemv(x[start:], jax.tree.map(lambda a: a[start:], w), implementation=backend)

    np.testing.assert_array_equal(f(p.x, p.tensor), p.answer()[start:, start:])
