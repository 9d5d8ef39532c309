"""MLX: weight uint32 (..., N, K b / 32), whose words are ours for every b.

- affine: scales and biases (..., N, K / g); `w = q * scale + bias`.
- mxfp4 and nvfp4: scales uint8, e8m0 for groups of 32 or e4m3 for groups of 16. mxfp8: words of four float8_e4m3fn.

The config has `quantization`: group_size, bits, mode, and the same for single layers by name.
Source: mlx/ops.cpp (quantize, dequantize) of https://github.com/ml-explore/mlx.
"""

import numpy as np

from jaxgemv import codebooks
from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import E4M3, E8M0, FLOATS, UINT8, Layer, ragged, stacked

MARKERS, WEIGHT = (".scales",), ".weight"
PARTS = (".weight", ".scales", ".biases")
_BITS = (1, 2, 3, 4, 5, 6, 8)


def owns(layer: Layer) -> bool:
    weight = layer.get(".weight")
    return weight is not None and weight.dtype == np.uint32 and weight.ndim >= 2


def entry(layer: Layer) -> Entry:
    weight = layer.need(".weight")
    *lead, n, width = weight.shape
    if layer.need(".scales").dtype == UINT8:
        return _one_byte(layer, weight, layer.need(".scales", (UINT8,), (*lead, n, None)))
    scales = layer.need(".scales", FLOATS, (*lead, n, None))
    biases = layer.need(".biases", FLOATS, scales.shape)
    own = layer.quantization.get(layer.prefix)
    quantization = {**layer.quantization, **own} if isinstance(own, dict) else layer.quantization
    group, bits = quantization.get("group_size"), quantization.get("bits")
    if type(group) is not int or group < 1 or bits not in _BITS:
        raise layer.error(".weight", f"described with group_size and bits, one of {_BITS}", (group, bits))
    k = scales.shape[-1] * group
    if k * bits != width * 32:
        raise layer.error(
            ".weight", f"of {k * bits // 32} words for {scales.shape[-1]} groups of {group}", width
        )

    def load() -> QuantizedTensor:
        return QuantizedTensor(packed=weight, scale=scales, offset=biases, bits=bits)

    return layer.entry(PARTS, (*lead, n, k), f"mlx int{bits}", load)


def _one_byte(layer: Layer, weight: np.ndarray, scales: np.ndarray) -> Entry:
    """Words for each scale tell the modes apart."""
    *lead, n, width = weight.shape
    mode = {4: "mxfp4", 2: "nvfp4", 8: "mxfp8"}.get(width // scales.shape[-1])
    if mode is None or width % scales.shape[-1]:
        raise layer.error(".scales", f"one for 2, 4 or 8 of {width} words", scales.shape)
    bits = 8 if mode == "mxfp8" else 4
    k = width * 32 // bits

    def load() -> QuantizedTensor:
        if mode == "mxfp8":
            return QuantizedTensor(packed=weight.view(E4M3), scale=scales.view(E8M0))
        return QuantizedTensor(
            packed=weight,
            scale=scales.view(E4M3 if mode == "nvfp4" else E8M0),
            codebook=stacked(codebooks.E2M1, tuple(lead)),
            bits=4,
            k=ragged(k, 4),
        )

    return layer.entry(PARTS, (*lead, n, k), mode, load)
