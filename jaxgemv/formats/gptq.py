"""GPTQ, version 1 and 2: AutoGPTQ, GPTQModel, Optimum.

For b bits and G groups: qweight int32 (K b / 32, N) is our words transposed; qzeros int32 (G, N b / 32) is packed along
N in the same order; scales (G, N); g_idx int32 (K,) names the group of each input.
Source: gptqmodel/nn_modules/qlinear of https://github.com/ModelCloud/GPTQModel.
"""

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import unpacked
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import FLOATS, WORDS, Layer, order_of_groups, permuted, words

MARKERS, WEIGHT = (".qweight",), ".weight"
PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (2, 3, 4, 8)


def owns(layer: Layer) -> bool:
    """Also AutoRound's files, without g_idx: its shapes are (words, N) and (G, N), unlike those that it has for AWQ."""
    if layer.quantization.get("quant_method") == "gptq" or layer.get(".g_idx") is not None:
        return True
    qweight, scales = layer.get(".qweight"), layer.get(".scales")
    if not _is_auto_round(layer) or scales is None or qweight is None:
        return False
    return (
        qweight.ndim == scales.ndim == 2
        and qweight.shape[1:] == scales.shape[1:]
        and len(qweight) != len(scales)
    )


def _is_auto_round(layer: Layer) -> bool:
    return str(layer.quantization.get("quant_method")).endswith("auto-round")


def _symmetric_here(layer: Layer) -> bool:
    """AutoRound's config may say it of a single module."""
    modules = layer.quantization.get("extra_config")
    module = modules.get(layer.prefix) if isinstance(modules, dict) else None
    here = module if isinstance(module, dict) else {}
    return here.get("sym", layer.quantization.get("sym")) is True


def entry(layer: Layer) -> Entry:
    form = layer.quantization.get("checkpoint_format", layer.quantization.get("format")) or "gptq"
    qweight = layer.need(".qweight")
    if form not in ("gptq", "gptq_v2") or qweight.dtype not in WORDS:
        why = f"in the order of a kernel ({form}, {qweight.dtype})"
        return layer.refused(PARTS, qweight.shape[::-1], "gptq", why)
    packing = str(layer.quantization.get("packing_format", layer.quantization.get("backend", "")))
    symmetric = layer.quantization.get("sym") is True
    if not layer.is_by("gptq", "auto-round"):
        return layer.refused(PARTS, qweight.shape[::-1], "gptq", "of a method that is not known here")
    if symmetric != _symmetric_here(layer):
        return layer.refused(PARTS, qweight.shape[::-1], "gptq", "symmetric unlike the others of its file")
    if _is_auto_round(layer) and "auto_gptq" not in packing and not symmetric:
        why = f"in a packing format whose zeros are not known here ({packing!r})"
        return layer.refused(PARTS, qweight.shape[::-1], "gptq", why)
    if qweight.ndim != 2:
        return layer.refused(PARTS, qweight.shape, "gptq", f"with a weight of {qweight.ndim} dimensions")
    scales = layer.need(".scales", FLOATS, (None, qweight.shape[1]))
    rows, n = qweight.shape
    groups = scales.shape[0]
    bits = _bits(layer, rows, n, groups)
    if bits not in _BITS:
        return layer.refused(PARTS, qweight.shape[::-1], f"gptq int{bits}", "of which there is no form here")
    k = rows * 32 // bits
    stated = layer.setting("group_size", least=-1)
    group, group_size = layer.group_of(".scales", k, groups, stated)
    g_idx = None if layer.get(".g_idx") is None else layer.need(".g_idx", WORDS, (k,)).view(np.int32)
    layer.need_if(layer.quantization.get("sym") is False, ".qzeros", "sym: false")
    layer.need_if(layer.quantization.get("desc_act") is True and groups > 1, ".g_idx", "desc_act: true")

    format = f"gptq int{bits}"

    def zeros() -> np.ndarray | None:
        """(N, G), or None for the mid code."""
        if layer.get(".qzeros") is None:
            return None
        stored = unpacked(words(layer.need(".qzeros")), bits, n).T
        mid = 1 << bits - 1
        # Whatever the file calls itself, only one reading is symmetric: some say "gptq" and store version 2.
        if symmetric and ((stored == mid).all() or (stored == mid - 1).all()):
            return None
        # Version 1 stores zero - 1, and a zero of 0 as the largest code.
        zero = stored if form == "gptq_v2" else stored + np.uint8(1) & np.uint8((1 << bits) - 1)
        return None if (zero == mid).all() else np.ascontiguousarray(zero)

    def load() -> QuantizedTensor:
        perm = None
        if g_idx is not None:
            perm, equal = order_of_groups(layer, ".g_idx", g_idx, groups, group)
            if not equal:
                return layer.converted(format, "whose act-order has groups of different sizes", weight)
        packed = words(qweight).T
        return QuantizedTensor(
            packed=packed if perm is None else permuted(packed, bits, perm),
            scale=scales.T,
            zero=zeros(),
            perm=perm,
            bits=bits,
            group_size=group_size,
        )

    def weight() -> np.ndarray:
        by = np.asarray(g_idx)
        zero = zeros()
        zero = np.float32(1 << bits - 1) if zero is None else zero[:, by].astype(np.float32)
        return (unpacked(words(qweight).T, bits, k) - zero) * scales.T[:, by].astype(np.float32)

    return layer.entry(PARTS, (n, k), format, load)


def _bits(layer: Layer, rows: int, n: int, groups: int) -> int:
    """From the shapes, since modules of a model may differ; else what the config says."""
    bits = layer.setting("bits")
    g_idx = layer.get(".g_idx")
    if g_idx is not None and g_idx.size:
        bits = rows * 32 // g_idx.size
    elif layer.get(".qzeros") is not None:
        stated, bits = bits, layer.need(".qzeros", WORDS, (groups, None)).shape[1] * 32 // n
        may_differ = layer.quantization.get("dynamic") or layer.quantization.get("extra_config")
        if stated not in (None, bits) and not may_differ:
            raise layer.error(".qzeros", f"of {stated} bits, as the config has it", bits)
    known = range(2, 9) if _is_auto_round(layer) else _BITS
    if bits is None or bits not in known or rows * 32 % bits:
        raise layer.error(".qweight", f"of 2, 3, 4 or 8 bits, in whole words for {rows} rows of them", bits)
    if layer.get(".qzeros") is not None:
        layer.need(".qzeros", WORDS, (groups, -(-n * bits // 32)))
    return bits
