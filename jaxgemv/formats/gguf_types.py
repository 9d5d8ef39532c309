"""The block types of GGUF: how each becomes codes, scales and offsets.

Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp. A row of K weights is K / block
blocks of `size` bytes; bit for bit what `gguf.quants.dequantize` makes of them.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxgemv import codebooks
from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import AT_ONCE, packed_words

# Type numbers of GGUF.
PLAIN = {
    0: ("F32", np.dtype("<f4")),
    1: ("F16", np.dtype("<f2")),
    24: ("I8", np.dtype("i1")),
    25: ("I16", np.dtype("<i2")),
    26: ("I32", np.dtype("<i4")),
    27: ("I64", np.dtype("<i8")),
    28: ("F64", np.dtype("<f8")),
    30: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
# Names of those of x in ggml's own products, and of rows interleaved for some CPUs, which are no longer written.
UNREAD = {9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
UNREAD |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
# Name, block, size.
UNREPRESENTABLE = {
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    29: ("IQ1_M", 256, 56),
}


class Decoded(NamedTuple):
    """Decoded blocks (..., blocks): codes (..., blocks, block), and for each group of a block scales and the rest."""

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None
    zero: float | None = None  # None: the mid code
    codebook: np.ndarray | None = None

    def parameters(self) -> list[np.ndarray]:
        return [a for a in (self.scale, self.offset) if a is not None]


class BlockType(NamedTuple):
    name: str
    block: int
    size: int
    bits: int
    group: int
    decode: Callable[[np.ndarray], Decoded]

    def tensor(self, rows: np.ndarray, scale_dtype: np.dtype | None) -> QuantizedTensor:
        """rows: uint8 (..., N, bytes). scale_dtype: instead of float32 scales.

        Some rows at a time: what is made on the way, up to four bytes a weight, stays in the caches.
        """
        *lead, nbytes = rows.shape
        n, blocks = prod(lead), nbytes // self.size
        k = blocks * self.block
        flat = rows.reshape(n, blocks, self.size)
        step = max(1, AT_ONCE // k)
        packed = np.empty((n, -(-k * self.bits // 32)), "<u4")
        decoded = self.decode(flat[:1])
        parameters = []
        for some in decoded.parameters():
            dtype = some.dtype if scale_dtype is None or some.dtype != np.float32 else scale_dtype
            parameters.append(np.empty((n, k // self.group), dtype))
        for first in range(0, n, step):
            decoded = self.decode(flat[first : first + step])
            codes = decoded.codes.reshape(-1, k)
            packed[first : first + step] = packed_words(codes, self.bits)
            for all_of_them, some in zip(parameters, decoded.parameters()):
                all_of_them[first : first + step] = some.reshape(len(codes), -1)
        scale, *offset = (a.reshape(*lead, -1) for a in parameters)
        stack, codebook = lead[:-1], decoded.codebook
        if codebook is not None:
            codebook = np.ascontiguousarray(np.broadcast_to(codebook, (*stack, 16)))
        return QuantizedTensor(
            packed=packed.reshape(*lead, -1),
            scale=scale,
            offset=offset[0] if offset else None,
            zero=None if decoded.zero is None else np.full(stack, decoded.zero, scale.dtype),
            codebook=codebook,
            bits=self.bits,
            k=k if k * self.bits % 32 else None,
        )


def _f16(b: np.ndarray, at: int) -> np.ndarray:
    """The float16 of each block at that byte."""
    return np.ascontiguousarray(b[..., at : at + 2]).view("<f2")[..., 0]


def _f32(b: np.ndarray, at: int) -> np.ndarray:
    return _f16(b, at).astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    """All low ones, then all high ones."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _bits_of(b: np.ndarray, count: int) -> np.ndarray:
    """Single bits of bytes, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(b), axis=-1, bitorder="little")[..., :count]


def _pairs_of_bits(b: np.ndarray) -> np.ndarray:
    """From (..., 32 i) bytes, for each 32 the lowest two bits of all, then the next two of all, and so on."""
    parts = b.reshape(*b.shape[:-1], -1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return parts.reshape(*b.shape[:-1], -1)


def _q4_0(b):
    return Decoded(_nibbles(b[..., 2:]), _f16(b, 0))


def _q4_1(b):
    return Decoded(_nibbles(b[..., 4:]), _f16(b, 0), _f16(b, 2))


def _q5_0(b):
    return Decoded(_nibbles(b[..., 6:]) | _bits_of(b[..., 2:6], 32) << 4, _f16(b, 0))


def _q5_1(b):
    return Decoded(_nibbles(b[..., 8:]) | _bits_of(b[..., 4:8], 32) << 4, _f16(b, 0), _f16(b, 2))


def _q8_0(b):
    return Decoded(b[..., 2:] ^ 0x80, _f16(b, 0))


def _scales_and_minima(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes of Q4_K and Q5_K: eight scales and eight minima of six bits."""
    a, m, high = s[..., :4], s[..., 4:8], s[..., 8:]
    scales = np.concatenate([a & 63, (high & 15) | a >> 6 << 4], axis=-1)
    return scales, np.concatenate([m & 63, high >> 4 | m >> 6 << 4], axis=-1)


def _in_halves(qs: np.ndarray) -> np.ndarray:
    """For each 32 bytes the low nibbles, then the high ones."""
    q = qs.reshape(*qs.shape[:-1], -1, 32)
    return np.stack([q & 15, q >> 4], axis=-2).reshape(*qs.shape[:-1], -1)


def _k_affine(codes, d, m, scales, minima):
    return Decoded(codes, d[..., None] * scales, -(m[..., None] * minima))


def _q2_k(b):
    scales = b[..., :16]
    return _k_affine(_pairs_of_bits(b[..., 16:80]), _f32(b, 80), _f32(b, 82), scales & 15, scales >> 4)


def _q3_k(b):
    # Bit j of the mask's byte i is the high bit of code 32 j + i.
    mask = b[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs_of_bits(b[..., 32:96]) | mask.reshape(*b.shape[:-1], 256) << 2
    s = b[..., 96:108]
    low = np.concatenate([s[..., :8] & 15, s[..., :8] >> 4], axis=-1)
    high = s[..., None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (low | high.reshape(*b.shape[:-1], 16) << 4).astype(np.int8) - 32
    return Decoded(codes, _f32(b, 108)[..., None] * scales)


def _q4_k(b):
    return _k_affine(_in_halves(b[..., 16:]), _f32(b, 0), _f32(b, 2), *_scales_and_minima(b[..., 4:16]))


def _q5_k(b):
    high = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _in_halves(b[..., 48:]) | high.reshape(*b.shape[:-1], 256) << 4
    return _k_affine(codes, _f32(b, 0), _f32(b, 2), *_scales_and_minima(b[..., 4:16]))


def _q6_k(b):
    low = b[..., :128].reshape(*b.shape[:-1], 2, 64)
    low = np.stack([low & 15, low >> 4], axis=-2).reshape(*b.shape[:-1], 256)
    codes = low | _pairs_of_bits(b[..., 128:192]) << 4
    return Decoded(codes, _f32(b, 208)[..., None] * b[..., 192:208].view(np.int8))


def _tq1_0(b):
    """Five digits of base 3 in a byte, as a fraction of 256; four in the last ones."""

    def digits(x, count):
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        shifted = (x[..., None, :] * powers).astype(np.uint8)  # modulo 256
        return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*x.shape[:-1], -1)

    codes = [digits(b[..., :32], 5), digits(b[..., 32:48], 5), digits(b[..., 48:52], 4)]
    return Decoded(np.concatenate(codes, axis=-1), _f16(b, 52), zero=1)


def _tq2_0(b):
    return Decoded(_pairs_of_bits(b[..., :64]), _f16(b, 64), zero=1)


def _q1_0(b):
    d = _f32(b, 0)
    return Decoded(_bits_of(b[..., 2:], 128), 2 * d, -d)


def _iq4_nl(b):
    return Decoded(_nibbles(b[..., 2:]), _f16(b, 0), codebook=codebooks.IQ4_NL)


def _iq4_xs(b):
    high = np.ascontiguousarray(b[..., 2:4]).view("<u2")
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (low | high << 4).astype(np.int8) - 32
    codes = _nibbles(b[..., 8:].reshape(*b.shape[:-1], 8, 16)).reshape(*b.shape[:-1], 256)
    return Decoded(codes, _f32(b, 0)[..., None] * scales, codebook=codebooks.IQ4_NL)


def _mxfp4(b):
    scale = np.ascontiguousarray(b[..., 0]).view(ml_dtypes.float8_e8m0fnu)
    return Decoded(_nibbles(b[..., 1:]), scale, codebook=codebooks.E2M1)


def _nvfp4(b):
    # ggml knows no sign of a scale, and no NaN: it takes that byte for zero.
    bytes_ = b[..., :4] & np.uint8(0x7F)
    bytes_ = np.where(bytes_ == 0x7F, np.uint8(0), bytes_)
    codes = _nibbles(b[..., 4:].reshape(*b.shape[:-1], 4, 8)).reshape(*b.shape[:-1], 64)
    return Decoded(codes, bytes_.view(ml_dtypes.float8_e4m3fn), codebook=codebooks.E2M1)


# By type number: name, codes of a block, its bytes, bits of a code, codes of a group, decoder.
TYPES = {
    2: BlockType("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 5, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 5, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, _q8_0),
    10: BlockType("Q2_K", 256, 84, 2, 16, _q2_k),
    11: BlockType("Q3_K", 256, 110, 3, 16, _q3_k),
    12: BlockType("Q4_K", 256, 144, 4, 32, _q4_k),
    13: BlockType("Q5_K", 256, 176, 5, 32, _q5_k),
    14: BlockType("Q6_K", 256, 210, 6, 16, _q6_k),
    20: BlockType("IQ4_NL", 32, 18, 4, 32, _iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, 4, 32, _iq4_xs),
    34: BlockType("TQ1_0", 256, 54, 2, 256, _tq1_0),
    35: BlockType("TQ2_0", 256, 66, 2, 256, _tq2_0),
    39: BlockType("MXFP4", 32, 17, 4, 32, _mxfp4),
    40: BlockType("NVFP4", 64, 36, 4, 16, _nvfp4),
    41: BlockType("Q1_0", 128, 18, 1, 128, _q1_0),
}
