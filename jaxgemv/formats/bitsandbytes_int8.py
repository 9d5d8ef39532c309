"""bitsandbytes' LLM.int8: weight int8 (N, K), SCB float32 (N,); `w = weight * SCB / 127`.

Source: bitsandbytes/nn/modules.py (Linear8bitLt) of https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import INT8, Layer, ragged, signed_bytes

MARKERS, WEIGHT = (".SCB",), ".weight"
PARTS = (".weight", ".SCB", ".weight_format")


def owns(layer: Layer) -> bool:
    return layer.get(".weight") is not None


def entry(layer: Layer) -> Entry:
    weight = layer.need(".weight", (INT8,), (None, None))
    scb = layer.need(".SCB", (np.dtype(np.float32),))
    if scb.size != len(weight):
        raise layer.error(".SCB", f"of {len(weight)} elements", scb.shape)
    order = layer.get(".weight_format")
    if order is not None and order.any():
        return layer.refused(PARTS, weight.shape, "bitsandbytes int8", "in the order of a kernel")

    def load() -> QuantizedTensor:
        scale = scb.reshape(-1, 1) * np.float32(1 / 127)
        return QuantizedTensor(packed=signed_bytes(weight), scale=scale, bits=8, k=ragged(weight.shape[1], 8))

    return layer.entry(PARTS, weight.shape, "bitsandbytes int8", load)
