"""bitsandbytes: NF4 and FP4, with double quantisation or without.

A weight is uint8 (... N K / 2, 1), all rows in one, the upper nibble first; weight.absmax float32, one for each
`blocksize` codes; weight.quant_map float32 (16,). With double quantisation absmax is uint8, and
`nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset`. The rest, the shape too, is JSON
in weight.quant_state.bitsandbytes__nf4 (or fp4). Parameters of other names, such as stacks of experts, have the same.

Source: bitsandbytes/functional.py (QuantState, dequantize_4bit) of https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

import json
from math import gcd, prod

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words, unpacked
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import UINT8, Layer, ragged, stacked

MARKERS, WEIGHT = (".absmax",), ""
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = (".nested_absmax", ".nested_quant_map")
PARTS = ("", ".absmax", ".quant_map", *_NESTED, *_STATES)
_FLOAT32 = (np.dtype(np.float32),)


def owns(layer: Layer) -> bool:
    return layer.get("") is not None


def _state(layer: Layer) -> dict:
    suffix = next((s for s in _STATES if layer.get(s) is not None), _STATES[0])
    text = layer.need(suffix, (UINT8,), (None,)).tobytes()
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise layer.error(suffix, "JSON", error) from None
    if not isinstance(state, dict):
        raise layer.error(suffix, "a JSON object", type(state).__name__)
    shape, blocksize = state.get("shape"), state.get("blocksize")
    if not (isinstance(shape, list) and len(shape) >= 2 and all(type(n) is int and n > 0 for n in shape)):
        raise layer.error(suffix, "of a shape (..., N, K)", shape)
    for key, value in (("blocksize", blocksize), ("nested_blocksize", state.get("nested_blocksize", 256))):
        if type(value) is not int or value < 1:
            raise layer.error(suffix, f"of a positive {key}", value)
    if type(state.get("nested_offset", 0.0)) not in (int, float):
        raise layer.error(suffix, "of a nested_offset that is a number", state["nested_offset"])
    return state


def entry(layer: Layer) -> Entry:
    state = _state(layer)
    *lead, n, k = shape = tuple(state["shape"])
    codes, size = prod(shape), state["blocksize"]
    weight = layer.need("").reshape(-1).view(UINT8)  # a float dtype may hold the bytes
    if weight.size != -(-codes // 2):
        raise layer.error("", f"of {-(-codes // 2)} bytes for {shape}", weight.size)
    table = layer.need(".quant_map", _FLOAT32, (16,))
    blocks = -(-codes // size)
    absmax = layer.need(".absmax", (UINT8, *_FLOAT32), (blocks,))
    if absmax.dtype == UINT8:
        nested = layer.need(_NESTED[0], _FLOAT32, (-(-blocks // state.get("nested_blocksize", 256)),))
        values = layer.need(_NESTED[1], _FLOAT32, (256,))
    group = gcd(size, k)  # a block that goes on in the next row is cut there

    def load() -> QuantizedTensor:
        swapped = weight >> 4 | weight << 4
        if k % 8 == 0:
            packed = swapped.reshape(*lead, n, k // 2)
        else:
            packed = packed_words(unpacked(swapped, 4, codes).reshape(shape), 4)
        scale = absmax
        if absmax.dtype == UINT8:
            by = np.arange(blocks) // state.get("nested_blocksize", 256)
            scale = values[absmax] * nested[by] + np.float32(state.get("nested_offset", 0.0))
        if group < size:
            scale = scale[np.arange(codes // group) * group // size]
        return QuantizedTensor(
            packed=packed,
            scale=scale.reshape(*lead, n, k // group),
            codebook=stacked(table, tuple(lead)),
            bits=4,
            k=ragged(k, 4),
        )

    return layer.entry(PARTS, shape, f"bitsandbytes {state.get('quant_type', '4 bits')}", load)
