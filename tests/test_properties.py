"""Random shapes, widths and forms: what no list of cases thought of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import on, transposed
from problems import Case, make, pack_bits
from random_examples import few
from tolerance import assert_close

from jaxgemv import gemv, pack, unpack

bits = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)
forms = st.sampled_from(["mid", "zero", "fraction", "integer", "offset"])
FLOATS = ["float16", "bfloat16", "float32"]
floats = st.sampled_from(FLOATS)
flags = {
    "form": forms,
    "bias": st.booleans(),
    "bytes": st.booleans(),
    "scale": st.sampled_from(["", *FLOATS]),
}
cases = st.builds(
    Case,
    m=st.integers(1, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.one_of(st.integers(1, 310), st.sampled_from(["row", "tensor"])),
    **flags,
)
# Of which fast kernels take many.
whole_cases = st.builds(
    Case,
    m=st.integers(1, 64),  # above, weights may be rounded
    n=st.one_of(st.integers(1, 40), st.integers(250, 300)),
    k=st.integers(1, 64).map(lambda blocks: 64 * blocks),
    group=st.sampled_from([32, 64, 128, 256, 512, 1024, 2048, "row", "tensor"]),
    **flags,
)


@few
@given(bits, st.integers(1, 200), seeds)
def test_pack_round_trip(bits, k, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (2, k))
    packed = pack(codes, bits)
    np.testing.assert_array_equal(packed, pack_bits(codes, bits))
    np.testing.assert_array_equal(unpack(packed, bits, k), codes)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="module")
def platform(request):
    """As `backend`, for tests of which one call is many examples."""
    with on(request.param):
        yield request.param


@few
@given(bits, floats, st.one_of(cases, whole_cases), seeds)
def test_kernels(platform, bits, x, case, seed):
    p = make(np.random.default_rng(seed), bits, x, case)
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=platform)
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=np.float32)


# Drawn at random, few examples would suit a fast kernel.
@few
@given(st.sampled_from([2, 4, 8]), st.sampled_from(["float16", "bfloat16"]), whole_cases, seeds)
def test_kernels_of_whole_groups(platform, bits, x, case, seed):
    p = make(np.random.default_rng(seed), bits, x, case._replace(scale=""), exact=True)
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=platform)
    np.testing.assert_array_equal(y, p.answer())


@few
@given(bits, floats, st.one_of(cases, whole_cases), seeds)
def test_transposed_kernels(platform, bits, x, case, seed):
    rng = np.random.default_rng(seed)
    p = make(rng, bits, x, case)
    ct = rng.standard_normal((case.m, case.n)).astype(p.x.dtype)
    y = transposed(ct, p.tensor, case.k, platform)
    ct = ct.astype(np.float64)
    magnitude = np.abs(ct) @ p.weight_magnitude()
    assert_close(y, ct @ p.weight(), magnitude, case.n, dtype=np.float32)


@few
@given(bits, floats, cases, seeds)
def test_exact_sums(bits, x, case, seed):
    """Where nothing rounds, kernel and reference agree with float64 to the last bit."""
    p = make(np.random.default_rng(seed), bits, x, case, exact=True)
    with on("cpu"):
        for implementation in ("cpu", "xla"):
            y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=implementation)
            np.testing.assert_array_equal(y, p.answer())
