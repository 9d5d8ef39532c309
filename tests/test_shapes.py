"""Rows, parameters and addresses of any kind through whichever kernel is chosen; test_kernels.py has each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import compiled, products
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65)
STARTS = (1, 3)


@compiled
@pytest.mark.parametrize(
    ("bits", "x"), [(4, "bfloat16"), (4, "float32"), (8, "float16"), (2, "float16"), (3, "float32")]
)
def test_rows(backend, bits, x, rng):
    """Any number of them, through whichever kernels there are for so many."""
    problems = [make(rng, bits, x, Case(m, 260, 512, 128, "zero"), exact=True) for m in ROWS]
    ys = products([(p.x, p.tensor, None) for p in problems], backend)
    for y, p in zip(ys, problems):
        np.testing.assert_array_equal(y, p.answer())


def test_rows_of_the_default(rng):
    """With implementation=None too, where many rows may go to XLA's matmul."""
    for m in (1, 64, 256, 257, 512, 513, 1300):
        p = make(rng, 4, "float32", Case(m, 20, 256, 64, "offset"), exact=True)
        np.testing.assert_array_equal(gemv(p.x, p.tensor), p.answer())


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


@compiled
@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize(("bits", "x"), [(2, "bfloat16"), (4, "float16"), (4, "float32"), (8, "bfloat16")])
def test_views_at_odd_offsets(backend, m, bits, x, rng):
    """XLA passes slices without a copy where it can, on GPUs those of whole 128 bytes: x, Wq and scale may start
    anywhere. The shapes suit the fast kernels, so that nothing else is in their way."""
    p = make(rng, bits, x, Case(m, 256, 512, 128, "zero"), exact=True)
    packed = p.packed.view(np.uint8)

    def spare(a, start):
        return jnp.concatenate([jnp.zeros(start, a.dtype), a.reshape(-1)])

    @jax.jit
    def f(*args):
        def product(start, x, bytes_, scale):
            w = QuantizedTensor(
                packed=bytes_[start:].reshape(packed.shape),
                scale=scale[start:].reshape(p.scale.shape),
                zero=p.zero,
                bits=bits,
            )
            return gemv(x[start:].reshape(p.x.shape), w, out_dtype="float32", implementation=backend)

        return [product(start, *each) for start, each in zip(STARTS, args)]

    for y in f(*([spare(a, start) for a in (p.x, packed, p.scale)] for start in STARTS)):
        np.testing.assert_array_equal(y, p.answer())


def test_rows_of_a_larger_matrix(backend, rng):
    """A row slice of every array, and of x, as pipelines make them."""
    p = make(rng, 3, "float32", Case(8, 21, 72, 24, "offset"), exact=True)

    @jax.jit
    def f(x, w):
        return [
            gemv(x[start:], jax.tree.map(lambda a, start=start: a[start:], w), implementation=backend)
            for start in (1, 2, 5)
        ]

    for start, y in zip((1, 2, 5), f(p.x, p.tensor)):
        np.testing.assert_array_equal(y, p.answer()[start:, start:])
