"""Each kernel by its name, with no other that could stand in for it, against float64; and which one is chosen."""

import contextlib
import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import must_take
from kernels import (
    ROUNDING,
    assert_ran,
    by_name,
    holds_entries,
    kernels,
    most_rows,
    products,
    transposed,
    transposed_products,
)
from problems import Case, Problem, make, pack_bits, unpack_bits
from tolerance import assert_close, held, rounded, significand

from jaxgemv import QuantizedTensor, gemv

pytestmark = [pytest.mark.kernels, pytest.mark.numerics]

both = pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])


@cache  # instruction sets share it
def problems_of(bits: int, x: str, cases: tuple[Case, ...], exact: bool, format="affine") -> list[tuple]:
    """Of each case a product, its answer and what errors are relative to.

    No x is so near zero that fixed point, which some kernels make of it, would lose of it what float32 keeps.
    """
    rng = np.random.default_rng(20251)
    made = [make(rng, bits, x, case, exact=exact, format=format) for case in cases]
    if not exact:
        least = [np.copysign(np.maximum(np.abs(p.x), p.x.dtype.type(2**-10)), p.x) for p in made]
        made = [dataclasses.replace(p, x=x) for p, x in zip(made, least, strict=True)]
    return [(p, p.answer(), p.magnitude()) for p in made]


@contextlib.contextmanager
def telling(case):
    """Which of several cases it was."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"case {case}")
        raise


def check(y, exact: bool, answer, magnitude, k: int, more=0.0) -> None:
    """In exact problems one wrong code anywhere changes a sum, and nothing rounds."""
    if exact:
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, answer)
    else:
        assert_close(y, answer, magnitude, k, dtype=jnp.float32, more=more)


def of_rounding(kernel, p: Problem) -> np.ndarray | float:
    """What a kernel may add to the error because it rounds weights, and of float32 also x; or a table."""
    if holds_entries(kernel):
        return held(p.x, np.broadcast_to(p.wide_scale(), p.values().shape), p.codebook)
    if kernel.name not in ROUNDING:
        return 0.0
    return rounded(p.x, p.weight(), p.x.dtype) * (2 if p.x.dtype == np.float32 else 1)


def rounds(kernel, p: Problem) -> bool:
    """Whether it does."""
    w = p.weight()
    return kernel.name in ROUNDING and bool((w != w.astype(significand(p.x.dtype)).astype(np.float64)).any())


@both
def test_values(kernel, exact):
    """Results in float32, so that rounding to x's dtype does not hide a wrong code."""
    cases = tuple(must_take(kernel))
    problems = problems_of(kernel.bits, kernel.x, cases, exact, kernel.format)
    ys = products([(p.x, p.tensor, p.bias) for p, *_ in problems], kernel.backend)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for case, y, (p, answer, magnitude) in zip(cases, ys, problems):
        with telling(case):
            check(y, exact and not rounds(kernel, p), answer, magnitude, p.k, of_rounding(kernel, p))


@cache
def transposed_problems_of(
    bits: int, x: str, cases: tuple[Case, ...], exact: bool, format: str
) -> list[tuple]:
    rng = np.random.default_rng(20251)
    made = []
    for case in cases:
        p, shape = make(rng, bits, x, case, exact=exact, format=format), (case.m, case.n)
        ct = rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)
        ct = np.asarray(ct).astype(p.x.dtype)
        wide = np.asarray(ct, np.float64)
        made.append((p, ct, wide @ p.weight(), np.abs(wide) @ p.weight_magnitude()))
    return made


@both
def test_transposed(transposed_kernel, exact):
    kernel = transposed_kernel
    cases = tuple(must_take(kernel, transposed=True))
    problems = transposed_problems_of(kernel.bits, kernel.x, cases, exact, kernel.format)
    args = [(ct, p.tensor) for p, ct, *_ in problems]
    ys = transposed_products(args, tuple(p.k for p, *_ in problems), kernel.backend)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for case, y, (_, _, answer, magnitude) in zip(cases, ys, problems):
        with telling(case):
            check(y, exact, answer, magnitude, case.n)


STACK = 3
IDS = np.array([2, -1, 0, STACK], np.int32)


@cache
def stack_of(bits: int, x: str, case: Case, format: str) -> tuple[list[Problem], QuantizedTensor]:
    rng = np.random.default_rng(20251)
    problems = [make(rng, bits, x, case, exact=True, format=format) for _ in range(STACK)]
    return problems, jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))


def test_index(kernel, rng):
    """One entry of a stack for all rows, and one for each slice of them; out of range gives NaN."""
    cases = [case for case in must_take(kernel) if case.bias and case.group != "row"]
    for case in (cases[0], cases[-1]):
        with telling(case):
            check_index(kernel, case, rng)


def check_index(kernel, case, rng):
    problems, w = stack_of(kernel.bits, kernel.x, case, kernel.format)
    biases = np.stack([p.bias for p in problems])
    x = rng.integers(-2, 3, (len(IDS), case.m, case.k)).astype(problems[0].x.dtype)
    args = [(x, w, biases, IDS), (x[0], w, biases, np.int32(1)), (x[1], w, biases[2], np.int32(0))]
    slices, one, shared_bias = products(args, kernel.backend)
    jax.block_until_ready((slices, one, shared_bias))
    assert_ran(kernel)

    def answer(entry, rows, bias=None):
        p = problems[entry]
        return np.asarray(rows, np.float64) @ p.weight().T + np.asarray(
            p.bias if bias is None else bias, float
        )

    np.testing.assert_array_equal(slices[0], answer(2, x[0]))
    np.testing.assert_array_equal(slices[2], answer(0, x[2]))
    assert np.isnan(slices[jnp.array([1, 3])]).all()
    np.testing.assert_array_equal(one, answer(1, x[0]))
    np.testing.assert_array_equal(shared_bias, answer(0, x[1], biases[2]))


def test_transposed_index(transposed_kernel, rng):
    """Out of range gives NaN, which does not depend on x: no gradient."""
    kernel = transposed_kernel
    case = must_take(kernel, transposed=True)[1]
    problems, w = stack_of(kernel.bits, kernel.x, case, kernel.format)
    ct = rng.integers(-2, 3, (len(IDS), case.m, case.n)).astype(problems[0].x.dtype)
    y = transposed(ct, w, case.k, kernel.backend, index=IDS)
    jax.block_until_ready(y)
    assert_ran(kernel)
    for i in (0, 2):
        np.testing.assert_array_equal(y[i], np.asarray(ct[i], np.float64) @ problems[IDS[i]].weight())
    np.testing.assert_array_equal(y[jnp.array([1, 3])], 0)


# More tiles than SMs, several slices of K, more rows than shared memory has room for at once, ragged ends of N and K:
# M, N, K, group.
LARGE = {
    "stream": [
        (1, 2500, 9216, 128),
        (1, 4099, 20608, 64),
        (1, 33, 40960, 32),
        (1, 5000, 4224, "row"),
        (3, 2121, 12544, 128),
        (8, 40000, 4096, 128),
        (5, 3000, 8192, "row"),
        (8, 17, 640, 64),
        (16, 2500, 4608, 128),
        (1, 4099, 20480, 256),
        (8, 2121, 12288, 1024),
        (2, 1000, 4096, 128),
        (1, 15194, 896, 128),
        (8, 4866, 1152, 128),
        (1, 4099, 4099, "row"),
        (1, 2501, 20481, 128),
        (2, 33, 40968, 64),
    ],
    "wgmma": [(16, 40000, 1024, 256), (17, 300, 4096, 128), (33, 4100, 2048, "row"), (64, 1028, 14336, 128)],
    "wgmma_any": [
        (9, 4099, 20480, 128),
        (33, 4100, 2048, "row"),
        (64, 1028, 14336, 128),
        (17, 40000, 1024, 256),
    ],
    "wgmma_tma": [
        (9, 4099, 20480, 128),
        (33, 4100, 2048, "row"),
        (64, 1028, 14336, 128),
        (17, 40000, 1024, 256),
        (40, 300, 3584, 128),
    ],
    "direct": [
        (1, 4099, 20480, 128),
        (3, 2121, 12416, 128),
        (9, 5000, 1280, 32),
        (33, 4100, 2048, "row"),
    ],
    "fma": [
        (1, 4099, 20480, 128),
        (2, 40000, 1024, 256),
        (2, 1028, 14336, 32),
        (1, 151, 4096, "row"),
    ],
    "gemm": [
        (65, 4099, 20480, 128),
        (130, 40000, 1024, 256),
        (700, 1028, 14336, 128),
        (96, 4100, 2048, "row"),
    ],
    "gemm_tma": [
        (65, 4099, 20480, 128),
        (130, 40000, 1024, 256),
        (700, 1028, 14336, 128),
        (1500, 4100, 2048, "row"),
        # Of which a CTA has several tiles, K ending within a round of stages: alone and in pairs, 128 columns and 256.
        (70, 34006, 384, 64),
        (200, 18000, 896, 128),
        (300, 18010, 640, 64),
    ],
    "mma_any": [
        (1, 4099, 20480, 128),
        (3, 2121, 12416, 128),
        (33, 4100, 2048, "row"),
        (64, 1028, 14336, 128),
    ],
}
large = by_name(k for k in kernels(transposed=False) if k.backend == "cuda" and k.name in LARGE)


@large
def test_large(kernel):
    """Against XLA's matmul on the same device; all values are exact, so results are equal, and so is a second one."""
    bits, x = kernel.bits, kernel.x
    for case in LARGE[kernel.name]:
        m, n, k, group = case
        m = min(m, most_rows(kernel) or m)
        if (kernel.name, bits, group) == ("stream", 2, 128) and k // group % 2 and m > 2:
            continue  # with two bits an odd number of groups is of 256 codes each
        group = {(1, 32): 128, (1, 64): 128, (2, 32): 64}.get((bits, group), group)
        keys = jax.random.split(jax.random.key(k + m), 4)
        shape = (n,) if group == "row" else (n, -(-k // group))
        w = QuantizedTensor(
            packed=jax.random.bits(keys[0], (n, -(-k * bits // 32)), "uint32"),
            scale=2.0 ** jax.random.randint(keys[1], shape, -1, 1).astype(x),
            zero=jax.random.randint(keys[2], shape, 0, 1 << bits).astype(x),
            bits=bits,
            group_size=None if group == "row" else group,
        )
        rows = jax.random.randint(keys[3], (m, k), -2, 3).astype(x)
        y = gemv(rows, w, out_dtype="float32", implementation="cuda")
        again = gemv(rows, w, out_dtype="float32", implementation="cuda")
        rounded = gemv(rows, w, implementation="cuda")
        exact = jnp.dot(rows.astype("float32"), w.dequantize("float32")[:, :k].T, precision="highest")
        with telling(case):
            np.testing.assert_array_equal(y, exact)
            np.testing.assert_array_equal(y, again)
            np.testing.assert_array_equal(rounded, exact.astype(x))
        assert_ran(kernel)


def with_weights(p: Problem, where: np.ndarray) -> Problem:
    """With weights there alone; all others are zero."""
    if p.is_float8:
        packed = p.packed.copy()
        packed[:, ~where] = 0
        return dataclasses.replace(p, packed=packed)
    packed = pack_bits(np.where(where, unpack_bits(p.packed, p.bits, p.k), 0), p.bits)
    if p.codebook is None:
        return dataclasses.replace(p, packed=packed, offset=np.zeros_like(p.offset))
    return dataclasses.replace(p, packed=packed, codebook=np.append(np.float32(0), p.codebook[1:]))


@by_name(
    k
    for k in kernels(transposed=False, formats=("affine", "codebook", "float8_e4m3fn"), xs=["float32"])
    if k.name == "stream"
)
def test_small_elements(kernel, rng):
    """Elements of float32 x, 2^-15 and 2^-30 of the largest, whose weights alone are not zero: none is lost."""
    k = 1280
    for group, log in [(k, 15), (64, 15), (128, 30), (512, 30)]:
        if (kernel.format, group) == ("codebook", k):
            continue  # which another kernel has
        small = np.isin(np.arange(k), rng.permutation(k)[:9])
        p = make(rng, kernel.bits, "float32", Case(1, 37, k, group, "offset"), format=kernel.format)
        x = np.where(small, 2.0**-log, 1) * rng.uniform(0.5, 1, (1, k))
        p = with_weights(dataclasses.replace(p, x=x.astype(np.float32)), small)
        y = gemv(p.x, p.tensor, implementation="cuda")
        jax.block_until_ready(y)
        assert_ran(kernel)
        with telling((group, log)):
            assert_close(y, p.answer(), p.magnitude(), k, dtype=jnp.float32, contract=True)


@by_name(k for k in kernels(transposed=False, formats=("codebook",)) if k.name == "stream" and k.bits == 4)
def test_teams(kernel, rng):
    """Short rows beside a table: several runs of rows in a CTA, the last of which may have a tile less."""
    for m, n, k, group in [
        (1, 20001, 256, 64),
        (1, 6501, 96, 32),
        (2, 13000, 512, 64),
        (8, 9999, 256, 32),
        (11, 30007, 384, 64),
    ]:
        case = Case(min(m, most_rows(kernel) or m), n, k, group)
        p = make(rng, kernel.bits, kernel.x, case, format=kernel.format)
        norm = rng.uniform(0.5, 1.5, k).astype(p.x.dtype)
        residual = rng.standard_normal((case.m, n)).astype(p.x.dtype)
        magnitude = p.magnitude()
        with telling(case):
            y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cuda")
            assert_ran(kernel)
            assert_close(y, p.answer(), magnitude, k, dtype=jnp.float32, more=of_rounding(kernel, p))
            if group == 64 and case.m <= 2:
                parts = dict(norm=norm, residual=residual, out_dtype="float32")
                y, expected = (gemv(p.x, p.tensor, **parts, implementation=i) for i in ("cuda", "xla"))
                assert_ran(kernel)
                np.testing.assert_allclose(y, expected, atol=2.0**-11 * magnitude.max(), rtol=0)


@large
def test_what_the_last_kernel_left(kernel, rng):
    """Shared memory full of NaN scales must not reach a row that ends before a warp's share of it does."""
    for m in {
        "stream": (1, 2, 8, 9),
        "wgmma": (9, 33),
        "wgmma_tma": (2, 9, 17, 33),
        "mma_any": (1, 9, 17, 33),
        "wgmma_any": (9, 17, 33),
        "gemm": (65, 130),
        "gemm_tma": (65, 130, 300),
        "direct": (1, 9),
        "fma": (1, 2),
    }[kernel.name]:
        m = min(m, most_rows(kernel) or m)
        full = make(rng, kernel.bits, kernel.x, Case(m, 4096, 2048, 128, "zero"))
        nan = jnp.full(full.scale.shape, jnp.nan, kernel.x)
        stale = QuantizedTensor(packed=full.packed, scale=nan, zero=nan, bits=kernel.bits)
        assert jnp.isnan(gemv(full.x, stale, implementation="cuda")).all()
        p = make(rng, kernel.bits, kernel.x, Case(m, 264, 1280, 128, "mid"), exact=True)
        y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cuda")
        np.testing.assert_array_equal(y, p.answer())


@by_name(k for k in kernels(transposed=False, xs=["float16", "bfloat16"]) if k.name == "stream")
def test_scales_of_other_rows(kernel):
    """Of a word that two rows have, each has its half: NaN stays in its row. The last row ends in the middle of one."""
    group = 512 // kernel.bits if 8 % kernel.bits == 0 else 128
    for m, n in ((1, 34), (2, 18), (3, 500)):
        m = min(m, most_rows(kernel) or m)
        keys = jax.random.split(jax.random.key(n), 2)
        nan = jnp.arange(n)[:, None] % 3 == 1
        w = QuantizedTensor(
            packed=jax.random.bits(keys[0], (n, 5 * group * kernel.bits // 32), "uint32"),
            scale=jnp.broadcast_to(jnp.where(nan, jnp.nan, 1), (n, 5)).astype(kernel.x),
            zero=jnp.ones((n, 5), kernel.x),
            bits=kernel.bits,
        )
        x = jax.random.randint(keys[1], (m, 5 * group), -2, 3).astype(kernel.x)
        y = gemv(x, w, out_dtype="float32", implementation="cuda")
        exact = jnp.dot(x.astype("float32"), w.dequantize("float32").T, precision="highest")
        np.testing.assert_array_equal(y, exact)
        np.testing.assert_array_equal(jnp.isnan(y), jnp.broadcast_to(nan[:, 0], y.shape))
        assert_ran(kernel)
