"""Mistakes in pack, unpack, quantize, dequantize; those in a product are in test_errors.py."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from test_errors import a, check, i8, i32, tensor, u8, u32

from jaxgemv import dequantize, pack, quantize, unpack

DEQUANTIZE = (
    (TypeError, "w.scale must be an array; got None", {"scale": None}),
    (ValueError, "w.packed must have shape (N, 9) for K = 65; got (6, 8)", {"k": 65}),
    (ValueError, "w.scale has 5 groups, which do not divide K = 64: give group_size=", {"scale": a(6, 5)}),
    (ValueError, "w.scale has 4 groups, which do not divide K = 85: give group_size=", {"bits": 3}),
    (TypeError, "w.packed must be an array; got None", {"packed": None}),
    (ValueError, "QuantizedTensor: packed must have shape (..., N, words); got ()", {"packed": a(dtype=u32)}),
    *(
        (ValueError, f"bits must be an integer from 1 to 8; got {b!r}", {"bits": b})
        for b in (0, -1, "4", 4.0)
    ),
)


@pytest.mark.parametrize(
    ("error", "text", "fields"), DEQUANTIZE, ids=[text[:40] for _, text, _ in DEQUANTIZE]
)
def test_dequantize(error, text, fields):
    w = tensor(**fields)
    text = text if text.startswith("QuantizedTensor") else "dequantize: " + text
    check(error, text, dequantize, w)
    assert repr(w).startswith("QuantizedTensor(")


@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex64])
def test_dequantize_to_no_float(dtype):
    text = f"dequantize: dtype must be a float dtype; got {np.dtype(dtype).name}"
    check(TypeError, text, dequantize, tensor(), dtype=dtype)


@pytest.mark.parametrize("bits", [0, -1, "4", 4.0, None])
def test_shape_of_no_bits(bits):
    with pytest.raises(ValueError, match="QuantizedTensor: bits must be an integer from 1 to 8; got "):
        tensor(bits=bits).shape  # noqa: B018


PACK = (
    (ValueError, "bits must be an integer from 1 to 8; got 0", [1], 0),
    (TypeError, "codes must be integers; got float32", np.zeros(3, np.float32), 4),
    (ValueError, "codes must have shape (..., K) with K >= 1; got ()", np.int32(3), 4),
    (ValueError, "codes must have shape (..., K) with K >= 1; got (2, 0)", np.zeros((2, 0), int), 4),
    (ValueError, "4-bit codes of dtype uint8 must lie in [0, 15]; got [0, 16]", np.uint8([0, 16]), 4),
    (ValueError, "4-bit codes of dtype int32 must lie in [0, 15]; got [-1, 3]", np.int32([3, -1]), 4),
    (ValueError, "4-bit codes of dtype int8 must lie in [-8, 7]; got [-9, 0]", np.int8([0, -9]), 4),
    (
        ValueError,
        f"4-bit codes of dtype uint64 must lie in [0, 15]; got [1, {2**63}]",
        np.array([1, 2**63], np.uint64),
        4,
    ),
)


@pytest.mark.parametrize(("error", "text", "codes", "bits"), PACK, ids=[text[:40] for _, text, *_ in PACK])
def test_pack(error, text, codes, bits):
    with pytest.raises(error, match="^" + re.escape("pack: " + text) + "$"):
        pack(codes, bits)


UNPACK = (
    (ValueError, "bits must be an integer from 1 to 8; got 9", a(4, dtype=u32), 9, 8),
    (ValueError, "packed must have shape (..., 3); got (4,)", a(4, dtype=u32), 3, 32),
    (ValueError, "packed must have shape (N, 12); got (2, 4)", a(2, 4, dtype=u8), 3, 32),
    *(
        (ValueError, f"k must be a positive integer; got {k!r}", a(4, dtype=u32), 4, k)
        for k in (0, -1, 32.0, True, "32", None)
    ),
    (TypeError, "packed must be uint32, or uint8 with the same bytes; got float32", a(3), 3, 32),
    (
        TypeError,
        "packed must be uint32, or uint8 with the same bytes; got float8_e4m3fn",
        a(3, dtype=jnp.float8_e4m3fn),
        8,
        3,
    ),
)


@pytest.mark.parametrize(
    ("error", "text", "packed", "bits", "k"), UNPACK, ids=[text[:40] for _, text, *_ in UNPACK]
)
def test_unpack(error, text, packed, bits, k):
    check(error, "unpack: " + text, unpack, packed, bits=bits, k=k)


QUANTIZE = (
    (ValueError, "bits must be an integer from 1 to 8; got True", a(6, 64), {"bits": True}),
    (TypeError, "weight must be a float array; got int32", a(6, 64, dtype=i32), {}),
    (TypeError, "scale_dtype must be float16, bfloat16 or float32; got int8", a(6, 64), {"scale_dtype": i8}),
    (ValueError, "in_axis must be an axis of weight, (6, 64); got None", a(6, 64), {"in_axis": None}),
    (ValueError, "in_axis must be an axis of weight, (6, 64); got 0.0", a(6, 64), {"in_axis": 0.0}),
    (ValueError, "in_axis must be an axis of weight, (6, 64); got True", a(6, 64), {"in_axis": True}),
    (TypeError, "symmetric must be True or False; got 'no'", a(6, 64), {"symmetric": "no"}),
    (
        TypeError,
        "scale_dtype must be a dtype or the name of one; got 'bf16'",
        a(6, 64),
        {"scale_dtype": "bf16"},
    ),
    (ValueError, "weight must have shape (..., N, K), N and K >= 1; got (64,)", a(64), {}),
    (ValueError, "weight must have shape (..., N, K), N and K >= 1; got (0, 64)", a(0, 64), {}),
    (
        ValueError,
        "weight must have shape (..., N, K), N and K >= 1; got (0, 3, 4)",
        a(0, 3, 4),
        {"in_axis": 0},
    ),
    (ValueError, "in_axis must be an axis of weight, (6, 64); got 2", a(6, 64), {"in_axis": 2}),
    (ValueError, "group_size must be a positive integer or None; got -1", a(6, 64), {"group_size": -1}),
    (
        ValueError,
        "format must be None or one of nf4, fp4, mxfp4, nvfp4, iq4_nl, fp8, mxfp8; got 'nf5'",
        a(6, 64),
        {"format": "nf5"},
    ),
    (
        ValueError,
        "format must be None or one of nf4, fp4, mxfp4, nvfp4, iq4_nl, fp8, mxfp8; got ['nf4']",
        a(6, 64),
        {"format": ["nf4"]},
    ),
    (ValueError, "bits must be 4 for format='nf4'; got 3", a(6, 64), {"format": "nf4", "bits": 3}),
    (ValueError, "bits must be 8 for format='fp8'; got 4", a(6, 64), {"format": "fp8", "bits": 4}),
    (
        ValueError,
        "group_size must be 64 for format='nf4'; got 128",
        a(6, 64),
        {"format": "nf4", "group_size": 128},
    ),
    (
        ValueError,
        "group_size must be 16 for format='nvfp4'; got None",
        a(6, 64),
        {"format": "nvfp4", "group_size": None},
    ),
    (
        ValueError,
        "group_size must be a positive integer or None; got 0",
        a(6, 64),
        {"format": "fp8", "group_size": 0},
    ),
    (
        ValueError,
        "symmetric must be False for format='mxfp4'; got True",
        a(6, 64),
        {"format": "mxfp4", "symmetric": True},
    ),
    (
        TypeError,
        "scale_dtype must be float8_e8m0fnu for format='mxfp4'; got float16",
        a(6, 64),
        {"format": "mxfp4", "scale_dtype": jnp.float16},
    ),
    (
        TypeError,
        "scale_dtype must be float16, bfloat16 or float32; got float8_e4m3fn",
        a(6, 64),
        {"format": "fp8", "scale_dtype": jnp.float8_e4m3fn},
    ),
    (ValueError, "method must be 'mse' or 'minmax'; got 'l1'", a(6, 64), {"method": "l1"}),
    (
        ValueError,
        "importance must be None for method='minmax'; got an array",
        a(6, 64),
        {"method": "minmax", "importance": np.ones(64, np.float32)},
    ),
    (TypeError, "importance must be a float array; got int64", a(6, 64), {"importance": np.ones(64, int)}),
    (TypeError, "importance must be an array; got str", a(6, 64), {"importance": "x"}),
    (
        ValueError,
        "importance must have shape (64,), one for each input; got (6,)",
        a(6, 64),
        {"importance": np.ones(6)},
    ),
    (
        ValueError,
        "importance must be finite and >= 0; got -1.0 to 1.0",
        a(6, 2),
        {"importance": np.array([1.0, -1.0])},
    ),
    (
        ValueError,
        "importance must be finite and >= 0; got nan to nan",
        a(6, 2),
        {"importance": np.array([1.0, np.nan])},
    ),
)


@pytest.mark.parametrize(
    ("error", "text", "weight", "options"), QUANTIZE, ids=[text[:40] for _, text, *_ in QUANTIZE]
)
def test_quantize(error, text, weight, options):
    check(error, "quantize: " + text, quantize, weight, **options)
