"""GGUF models in several files, written by `gguf` with the keys and names of llama.cpp's gguf-split."""

import re

import numpy as np
import pytest

from jaxgemv import formats

pytestmark = pytest.mark.numerics

gguf = pytest.importorskip("gguf")

COUNT = 3


@pytest.fixture
def write(tmp_path, rng):
    """Writes three parts, the first without tensors as gguf-split can have it; gives the weights."""
    weights = {f"blk.{i}.up.weight": rng.standard_normal((4, 64)).astype(np.float32) for i in range(4)}

    def write(**changes):
        """name=value: of the second part's keys."""
        for number, names in enumerate(([], list(weights)[:2], list(weights)[2:])):
            path = tmp_path / f"model-{number + 1:05}-of-{COUNT:05}.gguf"
            writer = gguf.GGUFWriter(path, "llama") if number == 0 else gguf.GGUFWriter(path, "")
            said = {"no": number, "count": COUNT, "tensors_count": len(weights)}
            said |= changes if number == 1 else {}
            writer.add_uint16("split.no", said["no"])
            writer.add_uint16("split.count", said["count"])
            writer.add_int32("split.tensors.count", said["tensors_count"])
            if number == 0:
                writer.add_block_count(4)
            for name in names + said.get("also", []):
                raw = gguf.quants.quantize(weights[name], gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            for act in ("header", "kv_data", "tensors"):
                getattr(writer, f"write_{act}_to_file")()
            writer.close()
        return weights

    return write


@pytest.mark.parametrize("name", ["model-00001-of-00003.gguf", "model-00003-of-00003.gguf", "."])
def test_parts(name, write, tmp_path):
    """Any of them, or their folder, is the model; keys are those of the first."""
    weights = write()
    checkpoint = formats.open(tmp_path / name)
    assert checkpoint.keys() == weights.keys()
    assert checkpoint.config == {"architecture": "llama", "block_count": 4}
    for key, weight in weights.items():
        raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(checkpoint[key].dequantize(np.float32), expected)


@pytest.mark.parametrize("name", ["model-00001-of-00003.gguf", "model-00002-of-00003.gguf"])
def test_missing(name, write, tmp_path):
    write()
    for gone in {"model-00001-of-00003.gguf", "model-00003-of-00003.gguf"} - {name}:
        (tmp_path / gone).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}: all 3 parts must .*missing: .*-00003-of-00003"):
        formats.open(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no": 2}, r"00002-of-00003\.gguf: split\.no must be 1, as its name says; got 2"),
        ({"count": 4}, r"00002-of-00003\.gguf: split\.count must be 3, as its name says; got 4"),
        (
            {"also": ["blk.3.up.weight"]},
            r"tensor blk\.3\.up\.weight must be in one part; got another one in ",
        ),
    ],
)
def test_contradictions(changes, match, write, tmp_path):
    write(**changes)
    with pytest.raises(ValueError, match=match):
        formats.open(tmp_path / "model-00001-of-00003.gguf")


def test_damaged(write, tmp_path):
    """A name that says nothing, a part that is cut, an empty one, one that is something else."""
    write()
    first, second = (tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2))
    (tmp_path / "other.gguf").write_bytes(first.read_bytes())
    with pytest.raises(
        ValueError, match=r"the name of one part must be NAME-00001-of-00003\.gguf, say; got other"
    ):
        formats.open(tmp_path / "other.gguf")
    data = second.read_bytes()
    for odd, match in (
        (data[:-40], r"tensor blk\.1\.up\.weight must be within"),
        (b"", "the magic must be .*; got an empty file"),
        (b"other", "the magic must be"),
    ):
        second.write_bytes(odd)
        with pytest.raises(ValueError, match=re.escape(str(second)) + f": {match}"):
            formats.open(first)


def test_tensors_that_none_has(write, tmp_path):
    write()
    first = tmp_path / "model-00001-of-00003.gguf"
    data = first.read_bytes()
    at = data.index(b"split.tensors.count") + 19 + 4
    first.write_bytes(data[:at] + (5).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(
        ValueError, match=r"split\.tensors\.count must be 4, as many as all parts have; got 5"
    ):
        formats.open(first)
