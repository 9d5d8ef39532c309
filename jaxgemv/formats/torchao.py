"""torchao's plain int4 (Int4Tensor), as its safetensors support stores it: NAME.weight is NAME._weight_qdata int8
(..., N, K / 2), the lower nibble first and in two's complement, and _weight_scale and _weight_zero_point
(..., K / g, N); `w = q * scale + zero_point` for q from -8 to 7.

Source: torchao/quantization/quantize_/workflows/int4/int4_tensor.py, torchao/prototype/safetensors of
https://github.com/pytorch/ao.
"""

import json

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import FLOATS, INT8, UINT8, Layer

MARKERS, WEIGHT = ("._weight_qdata",), ".weight"
PARTS = ("._weight_qdata", "._weight_scale", "._weight_zero_point", "._weight_act_pre_scale")


def owns(layer: Layer) -> bool:
    return True


def entry(layer: Layer) -> Entry:
    qdata = layer.need("._weight_qdata")
    kind = _kind(layer)
    if kind != "Int4Tensor" or layer.get("._weight_act_pre_scale") is not None:
        why = "of which only plain ones without act_pre_scale are known here"
        return layer.refused(PARTS, qdata.shape, f"torchao {kind}", why)
    if qdata.dtype not in (INT8, UINT8) or qdata.ndim < 2 or qdata.shape[-1] % 4:
        raise layer.error(
            "._weight_qdata", "int8 (..., N, K / 2) with K a multiple of 8", (qdata.dtype, qdata.shape)
        )
    *lead, n, half = qdata.shape
    k = half * 2
    scale = layer.need("._weight_scale", FLOATS, (*lead, None, n))
    zero = layer.need("._weight_zero_point", FLOATS, scale.shape)
    _, group_size = layer.group_of("._weight_scale", k, scale.shape[-2], None)

    def load() -> QuantizedTensor:
        # Codes here are from 0 to 15, so that 8 of each scale goes to the offset.
        offset = zero.astype(np.float32) - 8 * scale.astype(np.float32)
        return QuantizedTensor(
            packed=qdata.view(np.uint8) ^ np.uint8(0x88),
            scale=scale.swapaxes(-1, -2),
            offset=offset.swapaxes(-1, -2),
            bits=4,
            group_size=group_size,
        )

    return layer.entry(PARTS, (*lead, n, k), "torchao int4", load)


def _kind(layer: Layer) -> str:
    """The class, which the metadata has in JSON."""
    try:
        return str(json.loads(layer.source.metadata.get(layer.name, "{}")).get("_type", "Int4Tensor"))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return "unknown"
