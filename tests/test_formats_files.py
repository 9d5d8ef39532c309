"""Files and folders as such: indexes, damage, fuzzed headers, and what the command prints."""

import json
import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from layers import MADE, golden
from safetensors.numpy import save, save_file

from jaxgemv import formats
from jaxgemv.formats.__main__ import main

pytestmark = pytest.mark.numerics

ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
TWO = {"b": np.ones(4, np.int8)}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def info(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


@pytest.mark.parametrize("index", [False, True])
def test_folder(index, tmp_path):
    save_file(ONE, tmp_path / "model-1.safetensors", {"format": "np"})
    save_file(TWO, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    if index:
        save_file({"other": ONE["a"]}, tmp_path / "unrelated.safetensors")
        weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    checkpoint = formats.open(tmp_path)
    assert checkpoint.keys() == {"a", "b"}
    assert checkpoint.config == {"hidden_size": 3}
    assert checkpoint.metadata == {"format": "np", "quantization": {}}
    np.testing.assert_array_equal(checkpoint["a"], ONE["a"])
    assert np.shares_memory(checkpoint["a"], checkpoint["a"])
    assert not checkpoint["a"].flags.writeable


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"a": "../model.safetensors"}, "weight_map must be of files in its folder"),
        ({"a": "gone.safetensors"}, "weight_map must be of files in its folder"),
        ({"z": "model.safetensors"}, "tensor z must be in it, as the index says; got none"),
        ({"a": 3}, "weight_map must be an object of file names"),
        (["a"], "weight_map must be an object of file names"),
    ],
)
def test_index(weights, match, tmp_path):
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ValueError, match=match):
        formats.open(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    for name in ("x", "y"):
        save_file(ONE, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ValueError, match=r"y\.safetensors: tensor a must be in one file; got another one in x"
    ):
        formats.open(tmp_path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "the file must be at least 8 bytes long; got 0"),
        (b"1234567", "at least 8 bytes"),
        (file_of({}, length=9), "the length of the header must be at most 2; got 9"),
        (file_of({}, length=1 << 63), "the length of the header"),
        (file_of(b"{]"), "the header must be a JSON object"),
        (file_of(b"[]"), "the header must be a JSON object; got list"),
        (file_of(b'{"\xff": 1}'), "the header must be a JSON object"),
        (file_of(b'{"a":' + b"[" * 100_000), "the header must be a JSON object"),
        (file_of(b'{"a": 1, "a": 2}'), "a name that occurs twice"),
        (file_of({"__metadata__": []}), "__metadata__ must be an object"),
        (file_of({"t": 3}), "tensor t must be an object"),
        (file_of(info("F31"), bytes(8)), "the dtype of tensor t must be one of .*; got 'F31'"),
        (file_of(info(["F32"]), bytes(8)), "the dtype of tensor t"),
        (file_of(info(shape=(-2,)), bytes(8)), "the shape of tensor t"),
        (file_of(info(shape=(2.0,)), bytes(8)), "the shape of tensor t"),
        (file_of(info(shape=(True, 2)), bytes(8)), "the shape of tensor t"),
        (file_of(info(shape=[1] * 40 + [2]), bytes(8)), "the shape of tensor t"),
        (file_of(info(shape=(0, 1 << 62), offsets=(0, 0))), "the shape of tensor t"),
        (file_of(info(shape=(3,)), bytes(8)), r"tensor t must be 12 bytes for F32 \[3\]; got 8"),
        (file_of(info(offsets=(0, 12)), bytes(8)), "data_offsets of tensor t must be two, within 8 bytes"),
        (file_of(info(offsets=(8, 0)), bytes(8)), "data_offsets of tensor t"),
        (file_of(info(offsets=(0,)), bytes(8)), "data_offsets of tensor t"),
    ],
)
def test_damaged(data, match, tmp_path):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"formats\.open: .*odd\.safetensors: .*{match}"):
        formats.open(path)


def test_dtypes_that_numpy_lacks(tmp_path):
    """Such a tensor is refused when it is read, and those beside it are there."""
    ends = {
        "four": ("F4", [3, 4], 6),
        "six": ("F6_E2M3", [4], 9),
        "a": ("F32", [1], 13),
        "z": ("F8_E5M2FNUZ", [2], 15),
    }
    header, start = {}, 0
    for name, (dtype, shape, end) in ends.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, bytes(15)))
    checkpoint = formats.open(path)
    assert set(checkpoint) == set(ends)
    assert checkpoint["a"].tolist() == [0]
    assert checkpoint["z"].dtype.name == "float8_e5m2fnuz"
    assert checkpoint.entries["four"][:3] == ((3, 4), "F4", 6)
    for name in ("four", "six"):
        with pytest.raises(NotImplementedError, match=f"tensor {name} is of dtype F"):
            checkpoint[name]
    save_file({f"four.{name}": a for name, a in LAYER.items()}, tmp_path / "layer.safetensors")
    header = {"four.bias": header["four"], "four.weight": {**header["six"], "data_offsets": [6, 9]}}
    path.write_bytes(file_of(header, bytes(9)))
    with pytest.raises(ValueError, match=r"tensor four\.weight must be there once; got a quantised one too"):
        formats.open(tmp_path)


def test_no_metadata(tmp_path):
    """Which MLX writes as null."""
    info = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path = tmp_path / "mlx.safetensors"
    path.write_bytes(file_of({"__metadata__": None, "a": info}, bytes(4)))
    assert list(formats.open(path)) == ["a"]


LAYER = {"qweight": np.zeros((16, 8), np.int32), "scales": np.ones((4, 8), np.float16)}
LAYER |= {"qzeros": np.zeros((4, 1), np.int32), "g_idx": np.arange(128, dtype=np.int32) // 32}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scales": None}, r"tensor up\.scales must be there; got no such tensor"),
        (
            {"scales": np.ones((4, 9), np.float16)},
            r"tensor up\.scales must be of shape \(any, 8\); got \(4, 9\)",
        ),
        (
            {"scales": np.ones((3, 8), np.float16), "qzeros": None},
            r"up\.scales must be in groups that divide 128.*; got 3 groups",
        ),
        ({"scales": np.ones((4, 8), np.int8)}, r"up\.scales must be float16, bfloat16 or float32; got int8"),
        (
            {"qzeros": np.zeros((5, 1), np.int32)},
            r"tensor up\.qzeros must be of shape \(4, 1\); got \(5, 1\)",
        ),
        ({"g_idx": np.full(128, 4, np.int32)}, r"tensor up\.g_idx must be from 0 to 3; got 4 to 4"),
        ({"g_idx": np.zeros(100, np.int32)}, r"tensor up\.qweight must be of 2, 3, 4 or 8 bits"),
        (
            {"qweight": np.zeros((0, 8), np.int32)},
            r"tensor up\.qweight must be of 2, 3, 4 or 8 bits|at least",
        ),
    ],
)
def test_wrong_layer(change, match, tmp_path):
    tensors = {f"up.{name}": a for name, a in (LAYER | change).items() if a is not None}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"formats\.open: .*model\.safetensors: .*{match}"):
        formats.open(path)["up.weight"]


def test_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nothing"):
        formats.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="one GGUF or ONNX file; got none of them"):
        formats.open(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"model\.bin must be a GGUF, safetensors or ONNX file"):
        formats.open(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text("{")
    save_file(ONE, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json: the file must be a JSON object"):
        formats.open(tmp_path)


def test_no_such_tensor(tmp_path):
    save_file(ONE, tmp_path / "model.safetensors")
    checkpoint = formats.open(tmp_path)
    near = next(iter(checkpoint))
    with pytest.raises(KeyError, match=f"formats.open: no tensor '{near}s'; got {near}"):
        checkpoint[near + "s"]
    assert checkpoint.get(near + "s") is None


def test_onnx_that_is_none(tmp_path):
    pytest.importorskip("onnx")
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"model\.onnx: the file must be an ONNX model"):
        formats.open(tmp_path)


# --- fuzz ---


def gguf_file():
    """A header by hand, with keys of many types and two tensors."""

    def string(text):
        return struct.pack("<Q", len(text)) + text.encode()

    keys = {"general.alignment": (4, struct.pack("<I", 32)), "a.text": (8, string("text"))}
    keys["a.list"] = (9, struct.pack("<IQ", 8, 2) + string("one") + string("two"))
    keys["a.numbers"] = (9, struct.pack("<IQ", 5, 3) + bytes(12))
    keys["a.nested"] = (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 7, 2) + b"\1\0")
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, len(keys))
    header += b"".join(string(key) + struct.pack("<I", kind) + value for key, (kind, value) in keys.items())
    header += string("up.weight") + struct.pack("<IQQIQ", 2, 64, 2, 40, 0)
    header += string("up.scale") + struct.pack("<IQIQ", 1, 1, 0, 96)
    return header + bytes(-len(header) % 32) + bytes(128)


def layers_file():
    tensors = {f"up.{name}": a for name, a in LAYER.items()}
    tensors |= {"down.weight": np.zeros((4, 16), np.uint32), "down.scales": np.zeros((4, 4), np.uint8)}
    tensors |= {"q.weight": np.zeros((4, 16), np.uint8), "q.weight_scale": np.ones((4, 1), np.float32)}
    return save(tensors)


@pytest.mark.parametrize(("name", "make"), [("x.safetensors", layers_file), ("x.gguf", gguf_file)])
def test_fuzz(name, make, tmp_path):
    data = make()
    header = len(data) - 128 if name == "x.gguf" else 8 + struct.unpack("<Q", data[:8])[0]
    assert 1000 < fuzz(tmp_path / name, data, header, 5000) < 5000


@pytest.mark.parametrize("name", MADE)
def test_fuzz_families(name, tmp_path):
    """Of all that libraries made, the tensors and the config too."""
    golden(name, tmp_path)
    path = tmp_path / "model.safetensors"
    data, config = path.read_bytes(), tmp_path / "config.json"
    assert fuzz(path, data, len(data), 150)
    fuzz(config, config.read_bytes(), config.stat().st_size, 100)


def fuzz(path, data, end, count):
    """Mutations before `end`: they open, tensors and all, or are refused as they should be, and cost little memory."""
    rng = random.Random(20251)
    path.write_bytes(data)
    refused = 0
    for i in range(count):
        odd = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(end, len(odd)))
            kind = rng.random()
            if kind < 0.6:
                odd[at] = rng.choice((0, 1, 0x30 + rng.randrange(10), 0xFF, rng.randrange(256)))
            elif kind < 0.8:
                odd[at : at + 8] = struct.pack(
                    "<Q", rng.choice((0, 1 << 31, 1 << 40, (1 << 64) - 1, rng.randrange(999)))
                )
            elif kind < 0.9:
                del odd[at + 1 : at + rng.randint(2, 9)]
            else:
                odd = odd[: rng.randrange(len(odd))]
                break
        path.unlink()  # a file that is written over may be slow, and is still mapped
        path.write_bytes(odd)
        if i % 10 == 0:  # which makes all slow
            tracemalloc.start()
        try:
            checkpoint = formats.open(path if path.suffix != ".json" else path.parent)
            for tensor in checkpoint:
                checkpoint[tensor]
        except (ValueError, NotImplementedError):
            refused += 1
        if i % 10 == 0:
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
    return refused


# --- the command ---


def test_command(tmp_path, capsys, monkeypatch):
    save_file(
        {f"up.{name}": a for name, a in LAYER.items()} | {"norm": np.ones(8, np.float32)},
        tmp_path / "x.safetensors",
    )
    monkeypatch.setenv("TERM", "dumb")
    texts = []
    for rich in (True, False):
        if rich:
            pytest.importorskip("rich")
        monkeypatch.setattr(sys.stdout, "isatty", lambda rich=rich: rich)
        assert main([str(tmp_path)]) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        lines = [line.split() for line in text.splitlines()]
        assert "up.weight 8 x 128 gptq int4 8.62 1,104".split() in lines  # g_idx counts
        assert lines[-1][:2] == ["2", "tensors"]
        assert ["norm", "8", "float32", "32.00", "32"] in lines


def test_command_in_a_process(tmp_path):
    command = [sys.executable, "-m", "jaxgemv.formats", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "there is no" in done.stderr


def test_command_in_a_pipe_that_closes(tmp_path):
    save_file({f"layer.{i}": np.ones(8, np.float32) for i in range(2000)}, tmp_path / "x.safetensors")
    command = f"{sys.executable} -m jaxgemv.formats {tmp_path} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.split() == ["name", "shape", "format", "bits", "a", "weight", "bytes"]
    assert done.stderr == ""
