"""Which families there are, and how the tensors of safetensors files become entries."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxgemv._check import check_weight
from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats import (
    _other,
    awq,
    bitsandbytes,
    bitsandbytes_int8,
    compressed_tensors,
    fp8,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    torchao,
)
from jaxgemv.formats._checkpoint import Checkpoint, Entry
from jaxgemv.formats._layers import Layer, Options, Source
from jaxgemv.formats._safetensors import error, quantization_of, read_files, read_json

# Each has MARKERS, how a tensor's name may end that shows a layer of its own; WEIGHT, how the weight's name ends
# instead; PARTS, how all names of a layer may end; owns(layer), whether it is really its own; and entry(layer).
FAMILIES = (
    gptq,
    awq,
    bitsandbytes,
    bitsandbytes_int8,
    compressed_tensors,
    modelopt,
    fp8,
    mlx,
    hqq,
    gpt_oss,
    torchao,
    _other,
)
_SCALE_OF_X = ".pre_quant_scale"  # of ModelOpt, beside weights of any format
_MARKERS = [(marker, family) for family in FAMILIES for marker in family.MARKERS]


def read(files: Mapping[Path, set[str]], folder: Path, options: Options) -> Checkpoint:
    """files: with the tensors that must be in each. folder: where config.json may be."""
    (tensors, refused, metadata), places = read_files(files)
    config = read_json(folder / "config.json")
    quantization = quantization_of(folder, config)
    source = Source(tensors, places, metadata, config, quantization, options)
    entries: dict[str, Entry] = {}
    parts: set[str] = set()  # of quantised weights
    for name in tensors:
        layer_of = _layer(source, name)
        if layer_of is None:
            continue
        layer, family = layer_of
        entry = family.entry(layer)
        if layer.name.removesuffix(".weight") + _SCALE_OF_X in tensors:
            entry = layer.refused(
                family.PARTS, entry.shape, entry.format, f"with a scale of x ({_SCALE_OF_X[1:]})"
            )
        entries[layer.name] = entry._replace(load=partial(_checked, layer, entry))
        parts |= {layer.prefix + suffix for suffix in family.PARTS}
    others = {
        name: Entry(a.shape, a.dtype.name, a.nbytes, partial(np.asarray, a))
        for name, a in tensors.items()
        if name not in parts
    }
    for name, entry in (others | refused).items():
        if name in entries:
            raise error(places[name], f"tensor {name}", "there once", "a quantised one too")
        if name in parts:
            raise error(places[name], f"tensor {name}", "of a dtype that numpy has", entry.format)
        entries[name] = entry
    return Checkpoint(entries, config, {**metadata, "quantization": quantization})


def _layer(source: Source, name: str):
    for marker, family in _MARKERS:
        if name.endswith(marker):
            prefix = name.removesuffix(marker)
            layer = Layer(source, prefix, prefix + family.WEIGHT)
            if family.owns(layer):
                return layer, family
    return None


def _checked(layer: Layer, entry: Entry) -> QuantizedTensor | np.ndarray:
    w = entry.load()
    assert isinstance(w, QuantizedTensor)
    dtype = layer.source.options.scale_dtype
    if dtype is not None:
        both = {name: a for name in ("scale", "offset") if (a := getattr(w, name)) is not None}
        w = replace(w, **{name: a.astype(dtype) for name, a in both.items() if a.dtype == np.float32})
    check_weight(f"formats.open: tensor {layer.name}", w, w.shape[-1], "w.")
    return w
