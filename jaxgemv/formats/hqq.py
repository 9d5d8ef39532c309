"""HQQ: W_q holds codes grouped as (N K / g, g), planes of rows in one byte; scale and zero (N K / g, 1) float.

A byte of 4-bit codes is row i and row i + R / 2 of R, the first in its upper half; 2 and 1 bits are alike. 3 bits are
ten planes in the low 30 bits of an int32, the first uppermost, of R padded to a multiple of 10. 5, 6 and 8 bits have a
byte each.
What else there is to know is in tensors too: nbits, shape, group_size, axis; packing is text, one character a byte.

Source: hqq/core/bitpack.py and quantize.py of https://github.com/mobiusml/hqq.
"""

from math import gcd

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import FLOATS, INTEGERS, UINT8, Layer, ragged

MARKERS, WEIGHT = (".W_q",), ".weight"
_META = (
    "nbits group_size shape axis packing unpack_view_dtype view_as_float quant_scale quant_zero compute_dtype"
)
_FLAGS = "offload_meta encoded_state_dict stores_quant_config channel_wise optimize round_zero"
PARTS = (".W_q", ".scale", ".zero", *(f".{name}" for name in f"{_META} {_FLAGS}".split()))
# Bits of a code in memory, and codes of an item.
_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10)}


def owns(layer: Layer) -> bool:
    return True


def entry(layer: Layer) -> Entry:
    shape = tuple(layer.need(".shape", INTEGERS).ravel().tolist())
    if len(shape) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in shape):
        raise layer.error(".shape", "(N, K)", shape)
    n, k = shape
    packing = bytes(layer.need(".packing", (UINT8,), (None,))).decode("latin-1")
    if packing not in _PACKINGS:
        raise layer.error(".packing", f"one of {', '.join(_PACKINGS)}", packing[:40])
    bits, planes = _PACKINGS[packing]
    # Numbers such as 1.58 are ternary in two bits; five and six are in bytes.
    nbits = float(layer.need(".nbits", (*INTEGERS, *FLOATS)).ravel()[0])
    if not 1 <= nbits <= 8:
        raise layer.error(".nbits", "from 1 to 8", nbits)
    format = f"hqq int{nbits:g}"
    axis = int(layer.need(".axis", INTEGERS).ravel()[0])
    quantized = [layer.get(f".quant_{name}") for name in ("scale", "zero")]
    if any(a is not None and a.any() for a in quantized):
        return layer.refused(PARTS, shape, format, "whose scales are quantised themselves")
    w_q = layer.need(".W_q")
    scale, zero = layer.need(".scale", FLOATS), layer.need(".zero", FLOATS)
    rows, width = scale.size, n * k // scale.size
    if axis == 0:
        rows, width = width, rows
    step = -(-rows // planes)
    item = np.dtype(np.uint32 if planes == 10 else np.uint8)
    nbytes = step * width * item.itemsize
    if n * k % scale.size or zero.size != scale.size or w_q.nbytes != nbytes:
        raise layer.error(".W_q", f"{nbytes} bytes for {shape} in {scale.size} groups", f"{w_q.nbytes} bytes")

    def codes() -> np.ndarray:
        plane = w_q.reshape(-1).view(item).reshape(step, width)  # with view_as_float it has another dtype
        mask = (1 << bits) - 1
        parts = [(plane >> (planes - 1 - i) * bits & mask).astype(np.uint8) for i in range(planes)]
        return np.concatenate(parts)[:rows]

    def weight() -> np.ndarray:
        zeros, scales = (a.reshape(1, -1).astype(np.float32) for a in (zero, scale))
        return ((codes() - zeros) * scales).reshape(shape)

    if axis == 0:
        return layer.refused(PARTS, shape, format, "with groups along the outputs (axis 0)", weight)
    group = gcd(width, k)  # a group that goes on in the next row is cut there
    stored = int(np.ceil(nbits)) if bits == 8 else bits

    def load() -> QuantizedTensor:
        unpacked = codes().reshape(n, k)
        # It is the packing that counts: nbits may say less than there is.
        width_of_code = stored if unpacked.max() < 1 << stored else bits
        scales, zeros = (np.repeat(a.ravel(), width // group).reshape(n, k // group) for a in (scale, zero))
        return QuantizedTensor(
            packed=packed_words(unpacked, width_of_code),
            scale=scales,
            zero=zeros,
            bits=width_of_code,
            k=ragged(k, width_of_code),
        )

    return layer.entry(PARTS, shape, format, load)
