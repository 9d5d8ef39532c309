"""Few weights and few rows of x, which are XLA's own loop on a GPU: its numbers, and when it is one.

A CPU, which has no such loops, is made to have them here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import on, set_loop_rows
from problems import Case, make
from tolerance import assert_close

from jaxgemv import QuantizedTensor, gemv
from jaxgemv._ffi import TARGET

FORMATS = [("affine", bits) for bits in (1, 2, 4, 8)] + [("codebook", 4), ("codebook", 8), ("float8_e5m2", 8)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def loops(request, monkeypatch):
    """The backend for which small products are loops."""
    jax.clear_caches()  # of what was lowered otherwise
    if request.param == "cpu":
        set_loop_rows(monkeypatch, "cpu", 64)
    with on(request.param):
        yield request.param
    jax.clear_caches()


def is_loop(f, *args) -> bool:
    return TARGET not in jax.jit(f).lower(*args).as_text()


@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("format", "bits"), FORMATS)
def test_values(loops, format, bits, x, rng):
    """Ragged groups, K of no whole words, scales of other dtypes: within the contract of a kernel."""
    for case in (
        Case(1, 256, 512, 128, "zero"),
        Case(3, 70, 999, 32, "offset", scale="float32"),
        Case(8, 33, 40, "row", "fraction"),
        Case(1, 5, 7, "tensor", "integer"),
        Case(16, 300, 96, 96, "mid", scale="float16"),
    ):
        p = make(rng, bits, x, case, format=format)
        assert is_loop(gemv, p.x, p.tensor)
        y = gemv(p.x, p.tensor, out_dtype="float32")
        assert_close(y, p.answer(), p.magnitude(), case.k, dtype=jnp.float32)
        y = gemv(p.x, p.tensor)
        assert y.dtype == p.x.dtype
        assert_close(y, p.answer(), p.magnitude(), case.k, dtype=p.x.dtype)


def test_scales_of_one_byte(loops, rng):
    for dtype, group, factor in ("float8_e8m0fnu", 32, None), ("float8_e4m3fn", 16, 0.37):
        p = make(rng, 4, "bfloat16", Case(2, 64, 128, group), scale_dtype=dtype, format="codebook")
        w = QuantizedTensor(
            packed=p.packed,
            scale=p.scale,
            codebook=p.codebook,
            bits=4,
            global_scale=None if factor is None else np.float32(factor),
        )
        assert is_loop(gemv, p.x, w)
        expected, magnitude = ((factor or 1) * a for a in (p.answer(), p.magnitude()))
        assert_close(gemv(p.x, w, out_dtype="float32"), expected, magnitude, 128, dtype=jnp.float32)


def test_transformations(loops, rng):
    """A slice of several dimensions, vmap over x, and derivatives in x and in scale."""
    p = make(rng, 4, "float32", Case(12, 40, 64, 32, "zero"), exact=True)
    x = p.x.reshape(2, 2, 3, 64)
    assert is_loop(gemv, x, p.tensor)
    np.testing.assert_array_equal(gemv(x, p.tensor).reshape(12, 40), p.answer())
    np.testing.assert_array_equal(jax.vmap(gemv, (0, None))(x, p.tensor).reshape(12, 40), p.answer())
    dx = jax.grad(lambda x: gemv(x, p.tensor).sum())(jnp.asarray(p.x))
    np.testing.assert_array_equal(dx, np.broadcast_to(p.weight().sum(0), (12, 64)))

    def of_scale(scale):
        return gemv(p.x, QuantizedTensor(packed=p.packed, scale=scale, zero=p.zero, bits=4)).sum()

    slope = jax.jvp(of_scale, (jnp.asarray(p.scale),), (jnp.asarray(p.scale),))[1]
    assert slope == p.answer().sum()


@pytest.mark.cuda
def test_rows_that_are_padded():
    """Rows of float8 that are no whole words: XLA would pad them for a kernel, in every call."""
    with on("cuda"):
        for rows, k, loop in ((3, 4098, True), (4, 4098, False), (1, 4096, False)):
            w = QuantizedTensor(packed=jnp.ones((2048, k), "float8_e4m3fn"), scale=jnp.ones(2048))
            assert is_loop(gemv, jnp.ones((rows, k), "bfloat16"), w) == loop


def test_no_loop(loops, rng):
    """Parts are a kernel's; so is what is asked for by name, and an entry of a stack."""
    p = make(rng, 4, "float32", Case(1, 32, 64, 32), exact=True)
    x, w = jnp.asarray(p.x), p.tensor
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), w)
    assert is_loop(gemv, x, w)
    for f in (
        lambda x, w: gemv(x, w, implementation=loops),
        lambda x, w: gemv(x, w, bias=jnp.ones(32)),
        lambda x, w: gemv(x, w, residual=jnp.ones((1, 32))),
        lambda x, w: gemv(x, w, activation="silu"),
        lambda x, w: gemv(x, w, norm=jnp.ones(64)),
    ):
        assert not is_loop(f, x, w)
    assert not is_loop(lambda x, w: gemv(x, w, index=1), x, stack)
    assert not is_loop(jax.vmap(gemv), jnp.stack([x, x]), stack)
