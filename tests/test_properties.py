"""Random shapes, widths and forms: what no list of cases thought of."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Case, make, pack_bits
from tolerance import assert_close

from jaxgemv import gemv, pack, unpack

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)

bits = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)
forms = st.sampled_from(["mid", "zero", "fraction", "integer", "offset"])
floats = st.sampled_from(["float16", "bfloat16", "float32"])
cases = st.builds(
    Case,
    m=st.integers(1, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.one_of(st.integers(1, 310), st.sampled_from(["row", "tensor"])),
    form=forms,
    bias=st.booleans(),
    bytes=st.booleans(),
)


@few
@given(bits, st.integers(1, 200), seeds)
def test_pack_round_trip(bits, k, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (2, k))
    packed = pack(codes, bits)
    np.testing.assert_array_equal(packed, pack_bits(codes, bits))
    np.testing.assert_array_equal(unpack(packed, bits, k), codes)


@few
@given(bits, floats, floats, cases, seeds)
def test_cpu_kernels(bits, x, scale, case, seed):
    p = make(np.random.default_rng(seed), bits, x, case, scale_dtype=scale)
    with jax.default_device(jax.devices("cpu")[0]):
        y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation="cpu")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=np.float32)


@few
@given(bits, floats, floats, cases, seeds)
def test_transposed_cpu_kernels(bits, x, scale, case, seed):
    rng = np.random.default_rng(seed)
    p = make(rng, bits, x, case, scale_dtype=scale)
    ct = rng.standard_normal((case.m, case.n)).astype(p.x.dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        spec = jax.ShapeDtypeStruct(p.x.shape, np.float32)
        f = jax.linear_transpose(lambda x: gemv(x, p.tensor, out_dtype=ct.dtype, implementation="cpu"), spec)
        (y,) = f(jax.numpy.asarray(ct))
    ct = ct.astype(np.float64)
    magnitude = np.abs(ct) @ p.weight_magnitude()
    assert_close(y, ct @ p.weight(), magnitude, case.n, dtype=np.float32)


@few
@given(bits, floats, cases, seeds)
def test_exact_sums(bits, x, case, seed):
    """Where nothing rounds, kernel and reference agree with float64 to the last bit."""
    p = make(np.random.default_rng(seed), bits, x, case, exact=True)
    with jax.default_device(jax.devices("cpu")[0]):
        for implementation in ("cpu", "xla"):
            y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation=implementation)
            np.testing.assert_array_equal(y, p.answer())
