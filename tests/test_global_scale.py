"""A global scale and nothing else around a product: a factor in kernels of any number of rows."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from kernels import ROUNDING, assert_ran, by_name, kernels, most_rows, set_loop_rows
from problems import FLOAT8, Case, make
from test_every_code import FOR_MANY
from test_kernels import of_rounding
from test_lowering import built, calls, lowered, spec
from tolerance import assert_close

from jaxgemv import QuantizedTensor, _dispatch, gemv

K = 512


@pytest.mark.kernels
@by_name(
    k
    for k in kernels(transposed=False, formats=("codebook", *FLOAT8))
    if k.backend == "cuda"
    and "global_scale" in k.operands
    and k.bits in (4, 8)
    and (k.format, k.bits) != ("codebook", 8)
)
@pytest.mark.parametrize("n", [48, 50], ids="N={}".format)  # rows of whole 16 bytes, and others
def test_alone(kernel, n, rng):
    """One, and one for each row, with a bias; results in x's dtype and in float32."""
    most = {"stream": 2} | dict.fromkeys(ROUNDING, 300)
    for m in FOR_MANY.get(kernel.name, 1), most_rows(kernel) or most.get(kernel.name, 64):
        p = make(rng, kernel.bits, kernel.x, Case(m, n, K, 64, bias=True), format=kernel.format)
        for shape in (), (n,):
            factor = rng.uniform(0.5, 1.5, shape).astype(np.float32) / 8
            w = dataclasses.replace(p.tensor, global_scale=factor)
            by = np.reshape(factor.astype(np.float64), (-1, 1))
            whole = dataclasses.replace(p, scale=p.scale.astype(np.float64) * by)
            for dtype in p.x.dtype, np.float32:
                y = gemv(p.x, w, bias=p.bias, out_dtype=dtype, implementation=kernel.backend)
                jax.block_until_ready(y)
                assert_ran(kernel)
                more = of_rounding(kernel, whole)
                assert_close(y, whole.answer(), whole.magnitude(), K, dtype=dtype, more=more)


def nvfp4(n: int) -> QuantizedTensor:
    return QuantizedTensor(
        packed=spec(n, K // 8, dtype="uint32"),
        scale=spec(n, K // 16, dtype="float8_e4m3fn"),
        codebook=spec(16, dtype="float32"),
        global_scale=spec(dtype="float32"),
        bits=4,
    )


@built
@pytest.mark.parametrize("rows", [1, 9, 64, 65, 384])
def test_one_call(rows, monkeypatch):
    """And nothing is multiplied behind it."""
    monkeypatch.setattr(_dispatch, "_capability", lambda: 9)
    set_loop_rows(monkeypatch, "cuda", 0)
    jax.clear_caches()
    text = lowered("cuda", gemv, spec(rows, K), nvfp4(8192))
    (call,) = calls(text)
    assert f"tensor<1x{rows}x8192xbf16>" in call
    assert not re.search(r"stablehlo.multiply.*x8192xf32>", text)


@built
def test_in_the_weight(monkeypatch):
    """Where the weight is written, it has the scale, and no pass over the result multiplies that."""
    monkeypatch.setattr(_dispatch, "_capability", lambda: 9)
    jax.clear_caches()
    text = lowered("cuda", gemv, spec(4096, K), nvfp4(8192))
    assert not calls(text)
    assert "4096x8192xf32" not in text


@built
def test_with_other_parts_it_is_outside(monkeypatch):
    """A residual or an activation is behind it, and inside of kernels for few rows alone."""
    monkeypatch.setattr(_dispatch, "_capability", lambda: 9)
    jax.clear_caches()
    for rows in 16, 384:
        text = lowered("cuda", lambda x, w: gemv(x, w, activation="silu"), spec(rows, K), nvfp4(8192))
        (call,) = calls(text)
        assert f"tensor<1x{rows}x8192xf32>" in call
