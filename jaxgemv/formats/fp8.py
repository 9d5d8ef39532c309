"""Weights of float8, and a scale for each, each row, or each block.

- weight float8_e4m3fn or float8_e5m2 (..., N, K); the scale multiplies, whatever it is called.
- weight_scale_inv (..., ceil(N / n), ceil(K / k)) for blocks of n x k, 128 x 128 in DeepSeek's models
  (`weight_block_size` in the config, or `block_structure` in compressed-tensors').
- weight_scale: (), (1,), (N,), (N, 1), (N, G) or of blocks too, as compressed-tensors ("float-quantized"), ModelOpt and
  others have it; of uint8 it is e8m0 (MXFP8).

Source: inference/kernel.py (weight_dequant) of https://github.com/deepseek-ai/DeepSeek-V3.
"""

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import E4M3, E5M2, E8M0, FLOATS, UINT8, Layer

MARKERS, WEIGHT = ("_scale_inv", "_scale"), ""
PARTS = ("", "_scale_inv", "_scale")


def owns(layer: Layer) -> bool:
    weight = layer.get("")
    return weight is not None and weight.dtype in (E4M3, E5M2) and weight.ndim >= 2


def entry(layer: Layer) -> Entry:
    weight = layer.need("")
    suffix = "_scale" if layer.get("_scale_inv") is None else "_scale_inv"
    if suffix != "_scale" and layer.get("_scale") is not None:
        raise layer.error("_scale", "the only one", "one that is called _scale_inv too")
    scale = layer.need(suffix, (*FLOATS, E8M0, UINT8))
    scale = scale.view(E8M0) if scale.dtype == UINT8 else scale
    if scale.ndim == weight.ndim + 2 and scale.shape[-3] == scale.shape[-1] == 1:  # ModelOpt's, of blocks
        scale = scale[..., 0, :, 0]
    by_row, group_size = block_scale(layer, suffix, scale, weight.shape)

    def load() -> QuantizedTensor:
        return QuantizedTensor(packed=weight, scale=by_row(), group_size=group_size)

    return layer.entry(PARTS, weight.shape, "fp8 e4m3" if weight.dtype == E4M3 else "fp8 e5m2", load)


def block_scale(layer: Layer, suffix: str, scale: np.ndarray, shape: tuple[int, ...]):
    """A function that makes (..., N, G), (..., N) or (...) of a scale of blocks, rows or the whole weight (..., N, K);
    and what QuantizedTensor's group_size has to be."""
    *lead, n, k = shape
    for form in ((*lead,), (*lead, 1), (*lead, 1, 1)):
        if scale.shape == form:
            return lambda: scale.reshape(lead), None
    if scale.size == 1 and scale.ndim < 2:  # one for all of a stack
        return lambda: np.broadcast_to(scale.reshape(()), lead), None
    if scale.shape == (*lead, n):
        return lambda: scale, None
    if scale.ndim != len(shape) or scale.shape[:-2] != (*lead,):
        raise layer.error(suffix, f"one for the tensor, rows or blocks of {shape}", scale.shape)
    rows, groups = scale.shape[-2:]
    stated = _blocks(layer, suffix)
    # Without a statement groups of rows divide K if they can, and blocks are 128 x 128 or what divides the weight. Rows
    # may have groups, whatever blocks others have.
    of_rows = [(1, k // groups)] * (rows == n and k % groups == 0)
    equal = [(n // rows, k // groups)] * (n % rows == 0 and k % groups == 0)
    blocks = [*stated, *of_rows] if stated else [*of_rows, (128, 128), *equal]
    for height, width in blocks:
        high = next((b for b in (1, height, n) if -(-n // b) == rows), None)
        wide = next((b for b in (width, k) if -(-k // b) == groups), None)
        if high is not None and wide is not None:
            break
    else:
        sizes = " or ".join(f"{height} x {width}" for height, width in blocks)
        raise layer.error(suffix, f"one for each block of {sizes} in {(n, k)}", scale.shape)
    # Kernels take scales of rows.
    return (
        lambda: scale if high == 1 else np.repeat(scale, high, axis=-2)[..., :n, :],
        min(wide, k) if k % wide else None,
    )


def _blocks(layer: Layer, suffix: str) -> list[tuple[int, int]]:
    """The sizes that the config states: it may have several, and those of groups."""
    found: list = [layer.quantization.get("weight_block_size")]
    for scheme in layer.weight_schemes:
        block, group = scheme.get("block_structure"), scheme.get("group_size")
        if isinstance(block, str):  # "128x128", in older files
            block = [int(part) if part.isdecimal() else part for part in block.split("x")]
        found += [block, (1, group) if type(group) is int and group > 0 else None]
    found = [block for block in found if block is not None]
    for block in found:
        if not (
            isinstance(block, list | tuple)
            and len(block) == 2
            and all(type(b) is int and b > 0 for b in block)
        ):
            raise layer.error(suffix, "described with two integers, the size of a block", block)
    return [(height, width) for height, width in found]
