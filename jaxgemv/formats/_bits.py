"""Codes to packed words in numpy, which needs no device and no compilation for each shape."""

import numpy as np

AT_ONCE = 1 << 17  # codes: what is made on the way takes up to 16 bytes for each


def packed_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 (..., ceil(K b / 32)) of codes (..., K) below 2^b, of any integer dtype."""
    *lead, k = codes.shape
    if bits in (4, 8) and k * bits % 32 == 0:  # quick, of what most files have
        codes = codes.astype(np.uint8, copy=False)
        whole = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
        return np.ascontiguousarray(whole).view("<u4")
    rows = codes.reshape(-1, k)
    octets, width = -(-k // 8), -(-k * bits // 32) * 4
    packed = np.zeros((rows.shape[0], max(width, octets * bits)), np.uint8)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    step = max(1, AT_ONCE // k)
    for first in range(0, rows.shape[0], step):
        some = rows[first : first + step]
        whole = np.zeros((len(some), octets * 8), np.uint64)
        whole[:, :k] = some
        words = np.bitwise_or.reduce(whole.reshape(len(some), octets, 8) << shifts, axis=-1)
        octet_bytes = words.astype("<u8").view(np.uint8).reshape(len(some), octets, 8)[..., :bits]
        packed[first : first + step, : octets * bits] = octet_bytes.reshape(len(some), -1)
    return np.ascontiguousarray(packed[:, :width]).view("<u4").reshape(*lead, width // 4)


def unpacked(packed: np.ndarray, bits: int, k: int) -> np.ndarray:
    """uint8 codes (..., K) of such words, or of the same bytes; the other way round."""
    *lead, width = packed.shape
    rows = packed.reshape(-1, width)
    octets = -(-k // 8)
    codes = np.empty((rows.shape[0], k), np.uint8)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    step = max(1, AT_ONCE // k)
    for first in range(0, rows.shape[0], step):
        some = np.ascontiguousarray(rows[first : first + step]).view(np.uint8)
        whole = np.zeros((len(some), octets * bits), np.uint8)
        size = min(some.shape[1], octets * bits)
        whole[:, :size] = some[:, :size]
        words = np.zeros((len(some), octets, 8), np.uint8)
        words[..., :bits] = whole.reshape(len(some), octets, bits)
        eight = words.view("<u8") >> shifts & np.uint64((1 << bits) - 1)
        codes[first : first + step] = eight.reshape(len(some), octets * 8)[:, :k]
    return codes.reshape(*lead, k)
