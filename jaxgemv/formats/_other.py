"""Families whose codes do not stand for single weights: they are named, and AQLM's weight can be computed."""

import numpy as np

from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import FLOATS, Layer

# The suffix that marks a layer of each.
_NAMES = {
    ".codebooks": "AQLM",
    ".trellis": "EXL3",
    ".q_weight": "EXL2",
    ".Qidxs": "QuIP#",
    ".indices": "VPTQ",
    ".dense_weights": "SpQR",
}
MARKERS, WEIGHT = tuple(_NAMES), ".weight"
_ALL = {
    "AQLM": ".codebooks .codes .scales",
    "EXL3": ".trellis .suh .svh .mcg .mul1",
    "EXL2": ".q_weight .q_scale .q_scale_max .q_groups .q_invperm .q_group_map",
    "QuIP#": ".Qidxs .SU .SV .Wscale",
    "VPTQ": ".indices .centroids .weight_scale .weight_bias",
    "SpQR": ".dense_weights .row_offsets .col_vals .in_perm",
}
PARTS = tuple(suffix for parts in _ALL.values() for suffix in parts.split())


def _name(layer: Layer) -> str:
    return next(name for marker, name in _NAMES.items() if layer.get(marker) is not None)


def owns(layer: Layer) -> bool:
    parts = _ALL[_name(layer)].split()
    return layer.get(parts[0]) is not None and layer.get(parts[1]) is not None


def entry(layer: Layer) -> Entry:
    name = _name(layer)
    parts = tuple(_ALL[name].split())
    if name == "AQLM":
        return _aqlm(layer, parts)
    marked = layer.need(parts[0])
    return layer.refused(parts, marked.shape, name, "whose codes stand for several weights each")


def _aqlm(layer: Layer, parts: tuple[str, ...]) -> Entry:
    """codes int (N / o, K / i, C), codebooks (C, size, o, i), scales (N / o, 1, 1, 1): sums of C vectors.

    Source: aqlm/utils.py (_dequantize_weight) of https://github.com/Vahe1994/AQLM.
    """
    tables = layer.need(".codebooks", FLOATS, (None, None, None, None))
    count, size, outs, ins = tables.shape
    codes = layer.need(".codes", None, (None, None, count))
    if not np.issubdtype(codes.dtype, np.integer):
        raise layer.error(".codes", "of an integer dtype", codes.dtype)
    rows, columns, _ = codes.shape
    scales = layer.need(".scales", FLOATS, (rows, 1, 1, 1))

    def weight() -> np.ndarray:
        total = np.zeros((rows, columns, outs, ins), np.float32)
        for table, some in zip(tables, np.moveaxis(codes, -1, 0)):
            total += table.astype(np.float32)[some.astype(np.int64) % size]  # stored as signed numbers
        total *= scales.astype(np.float32)
        return total.swapaxes(1, 2).reshape(rows * outs, columns * ins)

    shape = (rows * outs, columns * ins)
    return layer.refused(parts, shape, "AQLM", "whose codes stand for several weights each", weight)
