"""Tables of 16 with scales of one byte in groups of 16 and 32, which kernels may multiply into what they decode.

Whether a table is E2M1 a kernel sees by its entries alone; then and only then are they exact in 16 bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import ROUNDING, assert_ran, by_name, holds_entries, kernels, products
from problems import Problem, pack_bits
from test_kernels import check, of_rounding, rounds

from jaxgemv import gemv
from jaxgemv.codebooks import E2M1, NF4

pytestmark = [pytest.mark.kernels, pytest.mark.numerics]

N = 50
TABLES = by_name(
    k
    for k in kernels(transposed=False, formats=["codebook"])
    if k.bits == 4
    and (
        k.name.startswith("wgmma")
        or k.name == "gemm_tma"
        or (k.name in ("stream", "direct", "mma_any") and k.x != "float32")
    )
)
NEARLY_E2M1 = E2M1.copy()
NEARLY_E2M1[5] = 3.5
BOOKS = {
    "e2m1": E2M1,
    "a sixth": E2M1 / 6,  # by a float32, so that products round
    "negative": E2M1 * np.float32(-0.37),
    "16 bits": E2M1.astype("bfloat16"),
    "nearly": NEARLY_E2M1,
    "nf4": NF4,
}


def rows_for(kernel, rows: int) -> int:
    """All numbers of columns of the kernels for more rows; a row of float32 is two."""
    of_kernel = {
        "wgmma_any": rows + 24,
        "wgmma_tma": {1: 9, 3: 12, 5: 20, 16: 40}.get(rows),
        "gemm_tma": {1: 65, 3: 70, 5: 130, 16: 300}.get(rows),
    }
    return of_kernel.get(kernel.name, rows)


def k_for(kernel) -> int:
    """K ends within a span of 256, of wgmma_tma and gemm_tma within 128 codes too."""
    return {"wgmma_tma": 1376, "gemm_tma": 1344}.get(kernel.name, 1408)


def make(rng, kernel, rows: int, k: int, scale: np.ndarray, book=E2M1, x=None) -> Problem:
    x = rng.standard_normal((rows, k)) if x is None else x
    return Problem(
        x=np.asarray(x).astype(jnp.dtype(kernel.x)),
        packed=pack_bits(rng.integers(0, 16, (N, k)), 4),
        scale=scale,
        zero=None,
        offset=None,
        bias=None,
        bits=4,
        group=k // scale.shape[-1],
        codebook=book,
    )


def e8m0(exponents, kernel=None) -> np.ndarray:
    """Powers of two; for a kernel that rounds weights to float16 such that it holds them."""
    if kernel and kernel.name in ROUNDING and kernel.x == "float16":
        exponents = np.where(exponents < 128, np.clip(exponents, -20, 12), exponents)
    return np.asarray(exponents + 127).astype(np.uint8).view("float8_e8m0fnu")


def assert_right(kernel, *problems: Problem) -> None:
    """Rows whose weights are NaN are NaN, and no others."""
    ys = products([(p.x, p.tensor, None) for p in problems], kernel.backend)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for p, y in zip(problems, ys, strict=True):
        nan = np.isnan(p.weight()).any(axis=-1)
        np.testing.assert_array_equal(np.isnan(np.asarray(y)), np.broadcast_to(nan, y.shape))
        kept = Problem(**{**vars(p), "packed": p.packed[~nan], "scale": p.scale[~nan]})
        check(y[:, ~nan], False, kept.answer(), kept.magnitude(), kept.k, allowed(kernel, kept))


def allowed(kernel, p: Problem) -> np.ndarray | float:
    """Nothing for E2M1 itself, which is exact, unless x or a weight is rounded."""
    may = p.codebook is not E2M1 if holds_entries(kernel) else kernel.x == "float32" or rounds(kernel, p)
    return of_rounding(kernel, p) if may else 0.0


ROWS = pytest.mark.parametrize("rows", [1, 5, 16])


@TABLES
@ROWS
def test_tables(kernel, rows, rng):
    """E2M1 by any factor, a table that differs in one entry, and one that has nothing of it."""
    k, rows = k_for(kernel), rows_for(kernel, rows)
    groups32, groups16 = (N, k // 32), (N, k // 16)
    scales = e8m0(rng.integers(-9, 4, groups32)), rng.uniform(0.2, 3, groups16).astype("float8_e4m3fn")
    assert_right(
        kernel, *(make(rng, kernel, rows, k, scale, book) for scale in scales for book in BOOKS.values())
    )


@TABLES
@ROWS
@pytest.mark.parametrize("book", ["e2m1", "nearly"])
def test_wide_powers(kernel, rows, book, rng):
    """Scales that differ by far more than fp16 has room for, and x that is zero where they are large."""
    k, rows = k_for(kernel), rows_for(kernel, rows)
    exponents = rng.integers(-60, 60, (N, k // 32))
    exponents[:, ::3] = rng.integers(-3, 3, exponents[:, ::3].shape)
    small = np.where(np.arange(k // 32) % 2, -55, 25) + rng.integers(-4, 4, (N, k // 32))
    x = rng.standard_normal((rows, k)) * np.repeat(np.arange(k // 32) % 2, 32)
    by_row = rng.integers(-100, 80, (N, 1)) + rng.integers(-14, 14, (N, k // 32))
    problems = (make(rng, kernel, rows, k, e8m0(e, kernel), BOOKS[book]) for e in (exponents, by_row))
    assert_right(kernel, *problems, make(rng, kernel, rows, k, e8m0(small, kernel), BOOKS[book], x))


@TABLES
@ROWS
@pytest.mark.parametrize("book", ["e2m1", "nearly"])
def test_special_scales(kernel, rows, book, rng):
    """The least and the largest powers of two, one that is NaN; of e4m3 NaN, negative and subnormal ones."""
    k, rows = k_for(kernel), rows_for(kernel, rows)
    powers = rng.integers(-10, 10, (N, k // 32))
    powers[::7, 5] = powers[::7, 40] = -127
    powers[1::7] = -127
    powers[2::7, 17] = 90
    powers[3::7, ::9] = powers[4::7, -1] = 128  # NaN
    floats = rng.uniform(0.2, 3, (N, k // 16)).astype("float8_e4m3fn").view(np.uint8)
    floats[::5] = rng.integers(0, 8, floats[::5].shape)  # multiples of 2^-9
    floats[1::5] = rng.integers(0x70, 0x7F, floats[1::5].shape)  # up to 448
    floats[2::5, ::3] |= 0x80
    floats[3, 7], floats[4, -1] = 0x7F, 0xFF
    x = rng.standard_normal((rows, k)) * 2.0**12  # nothing is near float32's least numbers
    assert_right(
        kernel,
        make(rng, kernel, rows, k, e8m0(powers, kernel), BOOKS[book], x),
        make(rng, kernel, rows, k, floats.view("float8_e4m3fn"), BOOKS[book]),
    )


@TABLES
@ROWS
def test_global_scale(kernel, rows, rng):
    """One number is a factor for as many rows as there are without, with E2M1 and with another table."""
    k, rows = k_for(kernel), rows_for(kernel, rows)
    scale = rng.uniform(0.2, 3, (N, k // 16)).astype("float8_e4m3fn")
    for book in "e2m1", "nearly":
        p, factor = make(rng, kernel, rows, k, scale, BOOKS[book]), np.float32(0.37)
        w = dataclasses.replace(p.tensor, global_scale=factor)
        y = gemv(p.x, w, out_dtype="float32", implementation="cuda")
        jax.block_until_ready(y)
        assert_ran(kernel)
        wide = dataclasses.replace(p, scale=p.scale.astype(np.float64) * np.float64(factor))
        check(y, False, wide.answer(), wide.magnitude(), k, allowed(kernel, wide))


@TABLES
@pytest.mark.parametrize("size", [16, 32])
def test_tables_of_a_stack(kernel, size, rng):
    """Each entry has a table of its own, E2M1 or not."""
    books = E2M1, NF4, E2M1 / 2, NEARLY_E2M1
    k, rows, dtype = 768, rows_for(kernel, 3), "float8_e4m3fn" if size == 16 else "float8_e8m0fnu"
    scales = [2.0 ** rng.integers(-3, 3, (N, k // size)) for _ in books]
    problems = [make(rng, kernel, rows, k, scale.astype(dtype), book) for scale, book in zip(scales, books)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    ids = np.asarray([3, 0, 1, 2, 0], np.int32)
    x = np.stack([problems[i].x for i in ids])
    [y] = products([(x, w, None, ids)], kernel.backend)
    jax.block_until_ready(y)
    assert_ran(kernel)
    for i, of_entry in zip(ids, y):
        p = problems[i]
        check(of_entry, False, p.answer(), p.magnitude(), k, of_rounding(kernel, p))
