"""bitsandbytes: NF4 and FP4, with double quantisation or without, and LLM.int8.

- 4 bits: weight uint8 (N K / 2, 1), all rows in one, the upper nibble first; weight.absmax float32, one for each
  `blocksize` codes; weight.quant_map float32 (16,). With double quantisation absmax is uint8, and
  `nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset`. The rest is JSON in
  weight.quant_state.bitsandbytes__nf4 (or fp4).
- LLM.int8: weight int8 (N, K), SCB float32 (N,); `w = weight * SCB / 127`.

Source: bitsandbytes/functional.py (QuantState, dequantize_4bit) of https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

import json
from math import gcd

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words, unpacked
from jaxgemv.formats._checkpoint import Entry, quantized_tensor
from jaxgemv.formats._layers import INT8, UINT8, Layer, ragged, signed_bytes

MARKERS, WEIGHT = (".weight.absmax", ".SCB"), ".weight"
_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
PARTS = (".weight", ".weight.absmax", ".weight.quant_map", *_NESTED, *_STATES, ".SCB", ".weight_format")
_FLOAT32 = (np.dtype(np.float32),)


def owns(layer: Layer) -> bool:
    return layer.get(".weight") is not None


def entry(layer: Layer) -> Entry:
    return _int8(layer) if layer.get(".weight.absmax") is None else _4bit(layer)


def _int8(layer: Layer) -> Entry:
    weight = layer.need(".weight", (INT8,), (None, None))
    scb = layer.need(".SCB", _FLOAT32)
    if scb.size != len(weight):
        raise layer.error(".SCB", f"of {len(weight)} elements", scb.shape)
    order = layer.get(".weight_format")
    if order is not None and order.any():
        return layer.refused(PARTS, weight.shape, "bitsandbytes int8", "in the order of a kernel")

    def load() -> QuantizedTensor:
        scale = scb.reshape(-1, 1) * np.float32(1 / 127)
        return quantized_tensor(
            packed=signed_bytes(weight), scale=scale, bits=8, k=ragged(weight.shape[1], 8)
        )

    return layer.entry(PARTS, weight.shape, "bitsandbytes int8", load)


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
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
        raise layer.error(suffix, "of a shape (N, K)", shape)
    for key, value in (("blocksize", blocksize), ("nested_blocksize", state.get("nested_blocksize", 256))):
        if type(value) is not int or value < 1:
            raise layer.error(suffix, f"of a positive {key}", value)
    if type(state.get("nested_offset", 0.0)) not in (int, float):
        raise layer.error(suffix, "of a nested_offset that is a number", state["nested_offset"])
    return state


def _4bit(layer: Layer) -> Entry:
    state = _state(layer)
    n, k = state["shape"]
    size = state["blocksize"]
    weight = layer.need(".weight").reshape(-1).view(UINT8)  # a float dtype may hold the bytes
    if weight.size != -(-n * k // 2):
        raise layer.error(".weight", f"of {-(-n * k // 2)} bytes for {(n, k)}", weight.size)
    table = layer.need(".weight.quant_map", _FLOAT32, (16,))
    blocks = -(-n * k // size)
    absmax = layer.need(".weight.absmax", (UINT8, *_FLOAT32), (blocks,))
    if absmax.dtype == UINT8:
        nested = layer.need(_NESTED[0], _FLOAT32, (-(-blocks // state.get("nested_blocksize", 256)),))
        values = layer.need(_NESTED[1], _FLOAT32, (256,))
    group = gcd(size, k)  # a block that goes on in the next row is cut there

    def load() -> QuantizedTensor:
        swapped = weight >> 4 | weight << 4
        if k % 8 == 0:
            packed = swapped.reshape(n, k // 2)
        else:
            packed = packed_words(unpacked(swapped, 4, n * k).reshape(n, k), 4)
        scale = absmax
        if absmax.dtype == UINT8:
            by = np.arange(blocks) // state.get("nested_blocksize", 256)
            scale = values[absmax] * nested[by] + np.float32(state.get("nested_offset", 0.0))
        if group < size:
            scale = scale[np.arange(n * k // group) * group // size]
        return quantized_tensor(
            packed=packed, scale=scale.reshape(n, k // group), codebook=table, bits=4, k=ragged(k, 4)
        )

    return layer.entry(PARTS, (n, k), f"bitsandbytes {state.get('quant_type', '4 bits')}", load)
