"""The CPU's kernels in each instruction set: rows, groups and sums that are shorter or longer than a kernel takes at a
time."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from test_kernels import telling
from tolerance import assert_close, rounded

from jaxgemv import QuantizedTensor, codebooks, gemv, quantize


def test_groups_longer_than_short_rows(isa, rng):
    """Rows that are less than what a kernel treats at a time, and scales that are for more."""
    for k, rows in itertools.product((16, 20, 31, 33), (1, 3, 12, 66)):
        for bits, format, x in [
            (3, "affine", "bfloat16"),
            (4, "codebook", "bfloat16"),
            (8, "float8_e4m3fn", "float32"),
        ]:
            p = make(rng, bits, x, Case(rows, 40, k, 64), format=format)
            if format == "codebook":  # of entries that are not bfloat16
                p = dataclasses.replace(p, codebook=codebooks.NF4)
            w = dataclasses.replace(p.tensor, group_size=64)
            y = gemv(p.x, w, out_dtype="float32", implementation="cpu")
            more = rounded(p.x, p.weight(), p.x.dtype) if rows > 64 and x == "bfloat16" else 0
            with telling((isa, k, rows, format)):
                assert_close(y, p.answer(), p.magnitude(), k, dtype=jnp.float32, more=more, contract=True)


@pytest.mark.parametrize(
    ("bits", "k", "group"), [(3, 120, 8), (3, 24, 8), (5, 60, 4), (5, 28, 4), (6, 60, 4), (7, 28, 4)]
)
def test_scales_of_other_rows(isa, bits, k, group, rng):
    """Of a last block that lacks codes and no word: NaN stays in its row."""
    w = quantize(rng.standard_normal((40, k)).astype(np.float32), bits=bits, group_size=group)
    w = dataclasses.replace(w, scale=w.scale.at[1::2].set(jnp.nan))
    for rows in (1, 2):
        y = gemv(jnp.ones((rows, k)), w, implementation="cpu")
        np.testing.assert_array_equal(jnp.isnan(y), jnp.broadcast_to(jnp.arange(40) % 2 == 1, y.shape))


def test_long_sums_of_bytes(isa):
    """All of one sign and as large as may be, which as one int32 would be negative."""
    k = 1 << 21
    x = jnp.full((1, k), 127, jnp.int8)
    w = QuantizedTensor(packed=jnp.full((3, k), 255, jnp.uint8), scale=jnp.ones(3), bits=8)
    y = gemv(x, w, x_scale=jnp.ones((1, 1)), implementation="cpu")
    np.testing.assert_allclose(y, np.full((1, 3), 127.0 * 127 * k), rtol=1e-6)


def test_long_sums_of_x(isa):
    """The same of x alone, whose sum a zero meets."""
    k = 20 << 20
    w = QuantizedTensor(
        packed=jnp.zeros((2, k // 32), jnp.uint32), scale=jnp.ones(2), zero=jnp.ones(2, jnp.int8), bits=1
    )
    for rows in (1, 3):
        y = gemv(jnp.full((rows, k), -128, jnp.int8), w, x_scale=jnp.ones((rows, 1)), implementation="cpu")
        np.testing.assert_allclose(y, np.full((rows, 2), 128.0 * k), rtol=1e-6)
