"""Checkpoints of one layer: written from its tensors, or as a library wrote it; and every bit of what is read."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxgemv import QuantizedTensor, formats

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
N, K, G = 32, 128, 4  # groups of 32
NAME = "layers.0.up"
WEIGHT = f"{NAME}.weight"


def write(folder, tensors, quantization=None, metadata=None):
    """A checkpoint of one file; the layer's tensors by what follows its name."""
    tensors = {NAME + suffix: np.ascontiguousarray(a) for suffix, a in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(folder, expected, *, name=WEIGHT, **options):
    """Every bit of every weight, and the entry's shape."""
    checkpoint = formats.open(folder, **options)
    w = checkpoint[name]
    assert isinstance(w, QuantizedTensor)
    assert checkpoint.entries[name].shape == w.shape == expected.shape
    if expected.dtype == np.float64:  # of integer codes; no bit is lost
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(w.dequantize(expected.dtype), expected)
    return w


def groups(rng, dtype=np.float16, shape=(N, G)):
    return rng.uniform(-0.1, 0.1, shape).astype(dtype)


GOLDEN = np.load(Path(__file__).parent / "data/formats.npz")
MADE = list(dict.fromkeys(name.split("/")[0] for name in GOLDEN.files))


def golden(name, folder):
    """Written by golden_formats.py, which says by what; and the weight as that read it."""
    (folder / "model.safetensors").write_bytes(GOLDEN[f"{name}/file"].tobytes())
    (folder / "config.json").write_bytes(GOLDEN[f"{name}/config"].tobytes())
    if f"{name}/weight_bf16" in GOLDEN.files:
        return GOLDEN[f"{name}/weight_bf16"].view(BF16)
    return GOLDEN[f"{name}/weight"]
