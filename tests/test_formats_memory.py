"""What opening and reading take: nothing for what is mapped, a tensor's own bytes for what is put into our order."""

import json
import struct
import subprocess
import sys
import tracemalloc
from math import prod
from pathlib import Path

import pytest

from jaxgemv import QuantizedTensor, formats
from jaxgemv.formats.gguf_types import TYPES

pytestmark = pytest.mark.numerics

N, K = 1024, 2048
MB = 1 << 20


def traced(f):
    """The result, and the most bytes that Python and numpy had at a time for it."""
    tracemalloc.start()
    try:
        return f(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sparse_gguf(path: Path, kind: int, count: int, n: int, k: int) -> Path:
    """A header by hand, and zeros that take no room on the disk."""
    nbytes = n * k // TYPES[kind].block * TYPES[kind].size
    header = b"GGUF" + struct.pack("<IQQ", 3, count, 0)
    for i in range(count):
        name = f"blk.{i}.weight".encode()
        header += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, k, n, kind, i * nbytes)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(-(-len(header) // 32) * 32 + count * nbytes)
    return path


SIZES = {"F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def sparse_safetensors(path: Path, tensors: dict[str, tuple]) -> Path:
    """tensors: dtype and shape. All zeros."""
    header, at = {}, 0
    for name, (dtype, *shape) in tensors.items():
        end = at + prod(shape) * SIZES[dtype]
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path


def test_eight_gigabytes_are_mapped(tmp_path):
    """Neither file could be read in the memory that is allowed."""
    files = {
        sparse_gguf(tmp_path / "x.gguf", 8, 120, 8192, 8192): "blk.7.weight",  # Q8_0
        sparse_safetensors(
            tmp_path / "x.safetensors", {f"layers.{i}.norm": ("BF16", 1 << 26) for i in range(64)}
        ): "layers.63.norm",
    }
    for path, name in files.items():
        assert path.stat().st_size > 8e9
        checkpoint, peak = traced(lambda path=path: formats.open(path))
        assert peak < MB
        assert len(checkpoint) >= 64
        assert name in checkpoint  # which reads it neither
    norm, peak = traced(lambda: checkpoint[name])
    assert (norm.nbytes, peak < MB) == (1 << 27, True)


G = K // 64
# Same-bytes families: a layer's tensors, and what the config says.
LAYERS = {
    "gptq": (
        {"qweight": ("I32", K // 8, N), "scales": ("F16", G, N)},
        {"quant_method": "gptq", "sym": True, "bits": 4},
    ),
    "awq": (
        {"qweight": ("I32", N, K // 8), "qzeros": ("I32", N, G // 8), "scales": ("F16", N, G)},
        {"quant_method": "awq", "version": "gemv", "w_bit": 4, "q_group_size": 64},
    ),
    "compressed-tensors": (
        {
            "weight_packed": ("U8", N, K // 2),
            "weight_scale": ("F8_E4M3", N, K // 16),
            "weight_global_scale": ("F32", 1),
        },
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "mlx": (
        {"weight": ("U32", N, K // 8), "scales": ("F16", N, G), "biases": ("F16", N, G)},
        {"bits": 4, "group_size": 64},
    ),
    "fp8": ({"weight": ("F8_E4M3", N, K), "weight_scale": ("F32", N, 1)}, {"quant_method": "fp8"}),
    "modelopt": (
        {"weight": ("U8", N, K // 2), "weight_scale": ("F8_E4M3", N, K // 16), "weight_scale_2": ("F32",)},
        {"quant_method": "modelopt"},
    ),
}


@pytest.mark.parametrize("family", LAYERS)
def test_same_bytes_are_not_copied(family, tmp_path):
    """What is made of a layer is less than a fiftieth of its codes: no copy of these or of scales.

    A transposed layer is a view too. AWQ's zeros are unpacked.
    """
    tensors, quantization = LAYERS[family]
    sparse_safetensors(tmp_path / "model.safetensors", {f"up.{n}": each for n, each in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    checkpoint = formats.open(tmp_path)
    w, peak = traced(lambda: checkpoint["up.weight"])
    assert isinstance(w, QuantizedTensor)
    assert w.shape == (N, K)
    assert peak < (N * K // 4 if family == "awq" else N * K // 100)


def test_reading_takes_a_tensor(tmp_path):
    """Of GGUF, whose codes are put into our order: the tensor itself, and what some rows take."""
    for kind, block in TYPES.items():
        path = sparse_gguf(tmp_path / f"{kind}.gguf", kind, 1, 4096, 2048)
        checkpoint = formats.open(path)
        w, peak = traced(lambda checkpoint=checkpoint: checkpoint["blk.0.weight"])
        assert peak < w.nbytes + 3 * MB, block.name


LOAD = """
import re, sys, threading, time
from pathlib import Path

import jax
from jaxgemv import formats

def used():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], used())

checkpoint = formats.open(sys.argv[1])
jax.device_put(1.0)
peak, done, before = [0], threading.Event(), used()
watcher = threading.Thread(target=watch)
watcher.start()
weights = jax.block_until_ready({name: jax.device_put(checkpoint[name]) for name in checkpoint})
done.set()
watcher.join()
print(peak[0] - before, sum(w.nbytes for w in weights.values()), max(w.nbytes for w in weights.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_model_and_a_tensor(tmp_path):
    """All of a Q4_K model on the device, in a process that watches its memory; the mapped file does not count."""
    path = sparse_gguf(tmp_path / "x.gguf", 12, 8, 8192, 4096)
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, model, tensor = map(int, done.stdout.split())
    assert model == 8 * 8192 * 4096 * 6 // 8
    assert model < peak < model + tensor + 24 * MB
