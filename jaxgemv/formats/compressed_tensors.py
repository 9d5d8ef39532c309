"""compressed-tensors: vLLM's and llm-compressor's; float-quantized weights are in fp8.py.

- pack-quantized: weight_packed int32 (..., N, ceil(K b / 32)) are our words; up to version 0.17.1 a word held 32 // b
  codes, which differs for 3, 5, 6 and 7 bits. weight_scale (..., N, G) or (..., N, 1); weight_shape (2,);
  weight_zero_point int32 (..., ceil(N b / 32), G), packed along N; weight_g_idx (K,) in old files, as in GPTQ.
- int-quantized: weight int8 (..., N, K), weight_scale, and weight_zero_point of int8 (..., N, G) if not symmetric.
- nvfp4-pack-quantized: weight_packed uint8 (..., N, K / 2), the lower nibble first, weight_scale float8_e4m3fn, and
  weight_global_scale, which divides. mxfp4-pack-quantized: weight_scale uint8, e8m0.

Source: compressed_tensors/compressors of https://github.com/vllm-project/compressed-tensors.
"""

from math import prod

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words, unpacked
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import (
    E4M3,
    E8M0,
    FLOATS,
    INT8,
    INTEGERS,
    UINT8,
    WORDS,
    Layer,
    fp4,
    objects,
    order_of_groups,
    permuted,
    ragged,
    signed_bytes,
    stacked,
    words,
)
from jaxgemv.formats.fp8 import block_scale

MARKERS, WEIGHT = (".weight_packed", ".weight_scale"), ".weight"
PARTS = (
    ".weight",
    ".weight_packed",
    ".weight_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
)


def owns(layer: Layer) -> bool:
    weight = layer.get(".weight")
    return layer.get(".weight_packed") is not None or (weight is not None and weight.dtype == INT8)


def entry(layer: Layer) -> Entry:
    if _turns_x(layer):
        shape = layer.need(".weight" if layer.get(".weight_packed") is None else ".weight_packed").shape
        return layer.refused(
            PARTS, shape, f"compressed-tensors {_format(layer)}", "with a transform of x or y"
        )
    if layer.get(".weight_packed") is None:
        return _int_quantized(layer)
    packed = layer.need(".weight_packed")
    if layer.get(".weight") is not None:
        raise layer.error(".weight", "there once", "a quantised one too")
    if packed.dtype == UINT8 and packed.ndim >= 2 and "fp6" not in _format(layer):
        return _fp4(layer, packed)
    if packed.dtype not in WORDS or packed.ndim < 2 or layer.get(".weight_shape") is None:
        why = f"which packs {packed.dtype} {packed.shape} for one kernel"
        return layer.refused(PARTS, packed.shape, f"compressed-tensors {_format(layer)}", why)
    return _pack_quantized(layer, packed)


def _format(layer: Layer) -> str:
    return str(layer.quantization.get("format", "packed"))


def _fp4(layer: Layer, packed: np.ndarray) -> Entry:
    scale = layer.need(".weight_scale", (E4M3, E8M0, UINT8))
    scale = scale.view(E8M0) if scale.dtype == UINT8 else scale
    suffixes = (".weight_packed", *PARTS[2:])
    if scale.dtype == E8M0 and layer.get(".weight_global_scale") is None:
        return fp4(layer, suffixes, packed, scale)
    divisor = layer.one_each(".weight_global_scale", packed.shape[:-2])
    return fp4(layer, suffixes, packed, scale, lambda: np.float32(1) / divisor.astype(np.float32))


def _bits(layer: Layer, codes: int, width: int) -> tuple[int, bool]:
    """The bits of rows with so many codes and words; and whether a word holds 32 // bits codes."""
    stated = [
        g["num_bits"]
        for g in layer.weight_schemes
        if type(g.get("num_bits")) is int and 1 <= g["num_bits"] <= 8
    ]
    found = [bits for bits in stated or range(1, 9) if -(-codes * bits // 32) == width]
    if len(found) > 1 and not stated:
        raise layer.error(".weight_packed", "described with num_bits in the config", f"{found} that fit")
    if found:
        return found[0], False
    for bits in stated:
        if -(-codes // (32 // bits)) == width:
            return bits, True
    raise layer.error(".weight_packed", f"of {stated or '1 to 8'} bits for rows of {codes}", f"{width} words")


def _codes(rows: np.ndarray, bits: int, count: int, by_word: bool) -> np.ndarray:
    """uint8 (..., count) of words (..., W)."""
    if not by_word:
        return unpacked(rows, bits, count)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (rows[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(*rows.shape[:-1], -1)[..., :count]


def _pack_quantized(layer: Layer, packed: np.ndarray) -> Entry:
    shape: list[int] = layer.need(".weight_shape", INTEGERS).ravel().tolist()
    *lead, rows, width = packed.shape
    if len(shape) < 2 or shape[-2] != rows or not 0 < shape[-1] <= width * 32:
        raise layer.error(".weight_shape", f"(N, K) for words {packed.shape}", shape)
    n, k = shape[-2:]
    bits, by_word = _bits(layer, k, width)
    scale, groups = layer.need(".weight_scale", FLOATS), 1
    if scale.size == prod(lead):
        scale = scale.reshape(lead)
    else:
        groups = layer.need(".weight_scale", FLOATS, (*lead, n, None)).shape[-1]
    stated = [
        g["group_size"]
        for g in layer.weight_schemes
        if type(g.get("group_size")) is int and g["group_size"] > 0
    ]
    fits = next((g for g in stated if -(-k // g) == groups), None)
    group, group_size = layer.group_of(".weight_scale", k, groups, fits)
    _need_stated(layer)
    zero = layer.get(".weight_zero_point")
    if zero is not None and zero.dtype == INT8:
        return layer.refused(
            PARTS[1:], (*lead, n, k), f"compressed-tensors int{bits}", "whose zeros are not packed"
        )
    if zero is not None:
        height = -(-n // (32 // bits)) if by_word else -(-n * bits // 32)
        zero = layer.need(".weight_zero_point", WORDS, (*lead, height, groups))
    g_idx = layer.get(".weight_g_idx")
    if g_idx is not None:
        g_idx = layer.need(".weight_g_idx", INTEGERS, (k,)).astype(np.int64)

    format = f"compressed-tensors int{bits}"

    def zeros() -> np.ndarray | None:
        return (
            None if zero is None else _codes(words(zero).swapaxes(-1, -2), bits, n, by_word).swapaxes(-1, -2)
        )

    def load() -> QuantizedTensor:
        w = packed_words(_codes(words(packed), bits, k, True), bits) if by_word else words(packed)
        perm, equal = None, True
        if g_idx is not None and not (g_idx < 0).all():  # which says that there is none
            perm, equal = order_of_groups(layer, ".weight_g_idx", g_idx, groups, group)
        if not equal:
            return layer.converted(format, "whose act-order has groups of different sizes", weight)
        if perm is not None:
            w, perm = permuted(w, bits, perm), stacked(perm, tuple(lead))
        return QuantizedTensor(
            packed=w,
            scale=scale,
            zero=zeros(),
            perm=perm,
            bits=bits,
            group_size=group_size,
            k=ragged(k, bits),
        )

    def weight() -> np.ndarray:
        by = np.asarray(g_idx)
        zero = zeros()
        zero = np.float32(1 << bits - 1) if zero is None else zero[..., by].astype(np.float32)
        return (_codes(words(packed), bits, k, by_word) - zero) * scale[..., by].astype(np.float32)

    return layer.entry(PARTS[1:], (*lead, n, k), format, load)


def _need_stated(layer: Layer) -> None:
    """What all schemes of the config say that a layer has: which of them is this layer's is not looked up."""

    def says(key: str, *values) -> bool:
        schemes = layer.weight_schemes
        return bool(schemes) and all(scheme.get(key) in values for scheme in schemes)

    layer.need_if(says("symmetric", False), ".weight_zero_point", "symmetric: false")
    layer.need_if(says("actorder", "group", "dynamic"), ".weight_g_idx", "actorder: group")


def _turns_x(layer: Layer) -> bool:
    """Whether the config has transforms of a layer's x or y, beside those that its weight has had already."""
    transforms = layer.quantization.get("transform_config")
    groups = objects(transforms.get("config_groups")) if isinstance(transforms, dict) else []
    steps = [step for group in groups for step in objects(group.get("apply"))]
    return any(step.get("location") in ("input", "output") for step in steps)


def _int_quantized(layer: Layer) -> Entry:
    weight = layer.need(".weight")
    if weight.ndim < 2:
        raise layer.error(".weight", "of two dimensions at least", weight.shape)
    *lead, n, k = weight.shape
    _need_stated(layer)
    scale = layer.need(".weight_scale", FLOATS)
    by_row, group_size = block_scale(layer, ".weight_scale", scale, weight.shape)
    zero = layer.get(".weight_zero_point")
    if zero is not None:
        zero = layer.need(".weight_zero_point", (INT8,), scale.shape)

    def load() -> QuantizedTensor:
        zeros = None
        if zero is not None:
            shifted = zero.astype(np.int16) + np.int16(128)
            zeros, _ = block_scale(layer, ".weight_zero_point", shifted, weight.shape)
        return QuantizedTensor(
            packed=signed_bytes(weight),
            scale=by_row(),
            zero=None if zeros is None else zeros(),
            bits=8,
            group_size=group_size,
            k=ragged(k, 8),
        )

    return layer.entry(PARTS, (*lead, n, k), "compressed-tensors int8", load)
