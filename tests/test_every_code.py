"""What every code stands for, by each kernel of tables and of float8: also where that is no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import ROUNDING, assert_ran, by_name, holds_entries, kernels, most_rows, products
from problems import pack_bits

from jaxgemv import QuantizedTensor, codebooks

pytestmark = [pytest.mark.kernels, pytest.mark.numerics]

FOR_MANY = {
    "amx_bf16": 12,
    "wgmma_any": 12,
    "wgmma_tma": 12,
    "gemm": 65,
    "gemm_tma": 65,
    "bf16_weights": 65,
}  # rows

FLOAT8_ROWS = by_name(
    k
    for k in kernels(transposed=False, formats=["float8_e4m3fn", "float8_e5m2"])
    if k.name not in ("bf16_dot", "bf16_panel", "amx_bf16") or k.x == "bfloat16"
)


@FLOAT8_ROWS
def test_every_float8(kernel):
    """All 256 codes against ml_dtypes, subnormal ones, NaN and infinities too; and K that ends within a word."""
    rows = most_rows(kernel) or FOR_MANY.get(kernel.name, 2)
    whole = kernel.name in ("direct", "f32_dot", "stream", "wgmma_tma", "gemm_tma")
    codes = np.zeros((256, 64 if whole else 195 if kernel.name == "amx_panel" else 67), np.uint8)
    codes[:, 5] = np.arange(256)
    x = np.zeros((rows, codes.shape[1]), jnp.dtype(kernel.x))
    x[:, 5] = 1
    w = QuantizedTensor(packed=codes.view(kernel.format), scale=np.float32(1))
    [y] = products([(x, w, None)], kernel.backend)
    jax.block_until_ready(y)
    assert_ran(kernel)
    expected = codes[:, 5].view(kernel.format).astype(np.float32)
    # Of float32 the second part of x is zero.
    if kernel.name in ("direct", "mma_any", "wgmma_any", "wgmma_tma") and kernel.x == "float32":
        expected[np.isinf(expected)] = np.nan
    np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


@by_name(
    k
    for k in kernels(transposed=False, formats=["codebook"])
    if k.bits == 4 and (k.backend == "cuda" or k.name in ("f32_dot", "f32_panel"))
)
@pytest.mark.parametrize("name", ["NF4", "FP4", "E2M1", "IQ4_NL", "random"])
def test_every_entry(kernel, name, rng):
    """Of tables that 16 bits can hold, that they can hold to 2^-14 by the right factor, and of no special kind."""
    book = getattr(codebooks, name) if name != "random" else rng.standard_normal(16).astype(np.float32)
    codes = np.zeros((16, 128), np.uint8)
    codes[:, 5] = np.arange(16)
    x = np.zeros((most_rows(kernel) or FOR_MANY.get(kernel.name, 2), 128), jnp.dtype(kernel.x))
    x[:, 5] = 1
    scale = np.ones((16, 2), np.float32)
    w = QuantizedTensor(packed=pack_bits(codes, 4), scale=scale, codebook=book, bits=4)
    [y] = products([(x, w, None)], kernel.backend)
    jax.block_until_ready(y)
    assert_ran(kernel)
    bits = 8 if kernel.name in ROUNDING and kernel.x == "bfloat16" else 11 if kernel.name in ROUNDING else 22
    error = np.abs(book).max() * 2.0**-14 if holds_entries(kernel) else np.abs(book) * 2.0**-bits
    assert (np.abs(np.asarray(y, np.float64) - book) <= error).all()


@by_name(
    k
    for k in kernels(transposed=False, formats=["codebook"])
    if k.bits == 4
    and k.x == "bfloat16"
    and k.name not in ("amx_panel", "bf16_weights")  # which leave these to others
)
def test_special_values(kernel):
    """Of one-byte scales e8m0's least ones (2^-127 is 0 to XLA's threads) and NaN; infinite ones stay so on CPUs."""
    rows = FOR_MANY.get(kernel.name, 2)
    book = np.asarray([1, 2] * 8, np.float32)
    for scale, expected in (
        (np.array([1, 255, 254], np.uint8).view("float8_e8m0fnu"), [2.0**-119, np.nan, np.inf]),
        (np.array([0, 0, 127], np.uint8).view("float8_e8m0fnu"), [0, 0, 128]),
        (np.array([0x7F, 0xFF, 1], np.uint8).view("float8_e4m3fn"), [np.nan, np.nan, 0.25]),
        (np.array([np.inf, -np.inf, np.nan], np.float32), [np.inf, -np.inf, np.nan]),
    ):
        scale, expected = np.repeat(scale, 8), np.repeat(np.float32(expected), 8)
        w = QuantizedTensor(packed=np.zeros((24, 16), np.uint32), scale=scale, codebook=book, bits=4)
        [y] = products([(np.ones((rows, 128), "bfloat16"), w, None)], kernel.backend)
        jax.block_until_ready(y)
        assert_ran(kernel)
        y = np.where(np.abs(y) == 2.0**-120, 0, y)
        if kernel.backend == "cuda":  # which multiply them with zeros too
            y, expected = (np.where(np.isinf(a), np.nan, a) for a in (y, expected))
        np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))
