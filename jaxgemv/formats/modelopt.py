"""NVFP4 and MXFP4 as ModelOpt has them: weight uint8 (..., N, K / 2) with the lower nibble first, weight_scale
float8_e4m3fn (..., N, K / 16), weight_scale_2 float32; `w = E2M1[q] * weight_scale * weight_scale_2`. MXFP4 has uint8
weight_scale (..., N, K / 32), which is e8m0, and no second one.

Source: modelopt/torch/quantization/qtensor/nvfp4_tensor.py of https://github.com/NVIDIA/Model-Optimizer.
"""

from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import E4M3, E8M0, UINT8, Layer, fp4

MARKERS, WEIGHT = (".weight_scale",), ".weight"
PARTS = (".weight", ".weight_scale", ".weight_scale_2")


def owns(layer: Layer) -> bool:
    weight = layer.get(".weight")
    return weight is not None and weight.dtype == UINT8 and weight.ndim >= 2


def entry(layer: Layer) -> Entry:
    weight = layer.need(".weight")
    scale = layer.need(".weight_scale")
    algorithm = layer.quantization.get("quant_algo", "packed")
    if scale.dtype not in (E4M3, E8M0, UINT8):
        why = f"with {scale.dtype} scales, for which there is no form here"
        return layer.refused(PARTS, (*weight.shape[:-1], weight.shape[-1] * 2), f"modelopt {algorithm}", why)
    scale = scale.view(E8M0) if scale.dtype == UINT8 else scale
    by = layer.one_each(".weight_scale_2", weight.shape[:-2]) if scale.dtype == E4M3 else None
    return fp4(layer, PARTS, weight, scale, None if by is None else lambda: by)
