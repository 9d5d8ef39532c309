"""AWQ with 4 bits: AutoAWQ's "gemm", "gemv" and "gemv_fast", the last of which is also llm-awq's version 2.

- gemm: qweight int32 (K, N / 8) and qzeros int32 (G, N / 8) are packed along N, nibble i of a word being column
  [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight; scales (G, N).
- gemv: qweight int32 (N, K / 8) are our words; qzeros int32 (N, Z) is packed along groups, and padded; scales (N, 8 Z).
- gemv_fast: qweight int16 (N / 4, K), interleaved; scales and qzeros (or scaled_zeros) float16 (8 Z, N), the latter
  what is added to q * scale.

Source: awq/utils/packing_utils.py and awq/modules/linear of https://github.com/casper-hansen/AutoAWQ.
"""

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words, unpacked
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import FLOATS, WORDS, Layer, words

MARKERS, WEIGHT = (".qweight",), ".weight"
PARTS = (".qweight", ".qzeros", ".scaled_zeros", ".scales")
_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]  # which nibble holds column i of eight
_INT16 = (np.dtype(np.int16), np.dtype(np.uint16))


def owns(layer: Layer) -> bool:
    """GPTQ has the same names, and is asked first."""
    return True


def entry(layer: Layer) -> Entry:
    bits = layer.setting("bits", "w_bit") or 4
    qweight = layer.need(".qweight", (*WORDS, *_INT16), (None, None))
    if not layer.is_by("awq", "auto-round"):
        return layer.refused(PARTS, qweight.shape, "awq", "of a method that is not known here")
    if bits != 4:
        return layer.refused(PARTS, qweight.shape, f"awq int{bits}", "of which only 4 bits are known here")
    scales = layer.need(".scales", FLOATS, (None, None))
    if qweight.dtype in _INT16:
        return _gemv_fast(layer, qweight, scales)
    version = str(layer.quantization.get("version", "")).lower()
    if version == "gemv" or (version != "gemm" and scales.shape[1] != qweight.shape[1] * 8):
        return _gemv(layer, qweight, scales)
    return _gemm(layer, qweight, scales)


def _gemm(layer: Layer, qweight: np.ndarray, scales: np.ndarray) -> Entry:
    k, n = qweight.shape[0], qweight.shape[1] * 8
    groups = scales.shape[0]
    layer.need(".scales", FLOATS, (groups, n))
    stated = layer.setting("group_size", "q_group_size", least=-1)
    _, group_size = layer.group_of(".scales", k, groups, stated)
    layer.need_if(layer.quantization.get("zero_point") is True, ".qzeros", "zero_point: true")
    qzeros = None if layer.get(".qzeros") is None else layer.need(".qzeros", WORDS, (groups, n // 8))

    def columns(a: np.ndarray) -> np.ndarray:
        """(N, rows) of (rows, N / 8)"""
        codes = unpacked(words(a), 4, n).reshape(len(a), n // 8, 8)[..., _COLUMNS]
        return codes.reshape(len(a), n).T

    def load() -> QuantizedTensor:
        return QuantizedTensor(
            packed=packed_words(columns(qweight), 4),
            scale=scales.T,
            zero=None if qzeros is None else columns(qzeros),
            bits=4,
            group_size=group_size,
            k=k if k % 8 else None,
        )

    return layer.entry(PARTS, (n, k), "awq int4", load)


def _gemv(layer: Layer, qweight: np.ndarray, scales: np.ndarray) -> Entry:
    n, k = qweight.shape[0], qweight.shape[1] * 8
    groups, group_size = _groups(layer, k, scales.shape[1])
    layer.need(".scales", FLOATS, (n, None))
    qzeros = layer.need(".qzeros", WORDS, (n, None))
    if qzeros.shape[1] * 8 != scales.shape[1]:
        raise layer.error(".qzeros", f"of {scales.shape[1]} codes a row, as .scales", qzeros.shape)

    def load() -> QuantizedTensor:
        return QuantizedTensor(
            packed=words(qweight),
            scale=scales[:, :groups],
            zero=unpacked(words(qzeros), 4, groups),
            bits=4,
            group_size=group_size,
        )

    return layer.entry(PARTS, (n, k), "awq int4", load)


def _gemv_fast(layer: Layer, qweight: np.ndarray, scales: np.ndarray) -> Entry:
    n, k = qweight.shape[0] * 4, qweight.shape[1]
    if k % 64:
        raise layer.error(".qweight", "of 64 i columns", qweight.shape)
    groups, group_size = _groups(layer, k, scales.shape[0])
    layer.need(".scales", FLOATS, (None, n))
    zeros = ".qzeros" if layer.get(".scaled_zeros") is None else ".scaled_zeros"
    offset = layer.need(zeros, FLOATS, scales.shape)

    def load() -> QuantizedTensor:
        # 16 bits are four codes of one row, and 64 such words are 64 codes each of four rows, one row after another.
        nibbles = qweight.view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
        rows = nibbles.astype(np.uint8).reshape(n // 4, k // 64, 64, 4).reshape(n // 4, k // 64, 4, 64)
        rows = rows.transpose(0, 2, 1, 3).reshape(n, k // 32, 4, 2, 4)
        # In each eight the even ones come first; and of 32, the pairs of an eight belong to four different eights.
        pairs = rows.transpose(0, 1, 2, 4, 3).reshape(n, k // 32, 4, 4, 2)
        return QuantizedTensor(
            packed=packed_words(pairs.transpose(0, 1, 3, 2, 4).reshape(n, k), 4),
            scale=scales[:groups].T,
            offset=offset[:groups].T,
            bits=4,
            group_size=group_size,
        )

    return layer.entry(PARTS, (n, k), "awq int4", load)


def _groups(layer: Layer, k: int, room: int) -> tuple[int, int | None]:
    """Groups, and what QuantizedTensor's group_size has to be."""
    stated = layer.setting("group_size", "q_group_size", least=-1)
    if stated is None:
        raise layer.error(".scales", "described with group_size in the config", "none")
    group = k if stated < 1 else min(stated, k)
    groups = -(-k // group)
    # Whole words of zeros, and of small groups twice or four times as many.
    words_of = -(-groups // 8)
    least = max(128 // group, 1)
    if room not in (groups, words_of * 8, -(-words_of // least) * least * 8):
        raise layer.error(".scales", f"of {groups} groups of {group}, padded", room)
    return groups, group if k % group else None
