"""gpt-oss: MXFP4 of experts, NAME_blocks uint8 (E, N, K / 32, 16) with the lower nibble first, and NAME_scales uint8
(E, N, K / 32), which are e8m0. OpenAI's own files call them NAME.blocks and NAME.scales.

The unquantised model of Transformers has (E, K, N); ours is (E, N, K), as every weight here.
Source: convert_moe_packed_tensors in transformers/integrations/mxfp4.py of https://github.com/huggingface/transformers.
"""

from jaxgemv.formats._checkpoint import Entry
from jaxgemv.formats._layers import E8M0, UINT8, Layer, fp4

MARKERS, WEIGHT = ("_blocks", ".blocks"), ""
PARTS = ("_blocks", "_scales", ".blocks", ".scales")


def owns(layer: Layer) -> bool:
    return _suffixes(layer) is not None


def _suffixes(layer: Layer) -> tuple[str, str] | None:
    both = (("_blocks", "_scales"), (".blocks", ".scales"))
    return next((s for s in both if layer.get(s[0]) is not None and layer.get(s[1]) is not None), None)


def entry(layer: Layer) -> Entry:
    suffixes = _suffixes(layer)
    assert suffixes
    blocks = layer.need(suffixes[0], (UINT8,))
    if blocks.ndim < 3 or blocks.shape[-1] != 16:
        raise layer.error(suffixes[0], "of shape (..., N, K / 32, 16)", blocks.shape)
    scales = layer.need(suffixes[1], (UINT8,), blocks.shape[:-1])
    packed = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * 16)
    return fp4(layer, suffixes, packed, scales.view(E8M0))
