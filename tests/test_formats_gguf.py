"""GGUF: files that `gguf` wrote, of random blocks of every type, against its own reading of them."""

import ml_dtypes
import numpy as np
import pytest

from jaxgemv import QuantizedTensor, codebooks, formats
from jaxgemv.formats.gguf_types import TYPES

pytestmark = pytest.mark.numerics

gguf = pytest.importorskip("gguf")

N, BLOCKS = 6, 3
# Where the float16 numbers of a block are.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q1_0", "IQ2_XXS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
SIZES = {kind.name: kind.size for kind in TYPES.values()} | {"IQ2_XXS": 66}


def blocks(name, rng, lead=(N,)):
    """uint8 (..., N, bytes), finite."""
    raw = rng.integers(0, 256, (*lead, BLOCKS, SIZES[name]), np.uint8)
    for at in HALVES.get(name, ()):
        d = rng.uniform(-1, 1, raw.shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = d[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(100, 150, raw.shape[:-1])
    return raw.reshape(*lead, -1)


def kind_of(name):
    return gguf.GGMLQuantizationType[name]


@pytest.fixture
def write(tmp_path):
    def write(tensors, **keys):
        """name: a float array, or raw bytes and their type."""
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        for key, value in keys.items():
            writer.add_uint32(f"llama.{key}", value)
        for name, tensor in tensors.items():
            raw, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize("name", [kind.name for kind in TYPES.values() if kind.name != "Q1_0"])
def test_types(name, write, rng):
    raw = blocks(name, rng)
    path = write({"blk.0.weight": (raw, kind_of(name))}, block_count=7)
    checkpoint = formats.open(path)
    w = checkpoint["blk.0.weight"]
    expected = gguf.quants.dequantize(raw, kind_of(name))
    assert w.shape == checkpoint.entries["blk.0.weight"].shape == expected.shape
    np.testing.assert_array_equal(w.dequantize(np.float32), expected)
    assert checkpoint.config == {"architecture": "llama", "block_count": 7}
    assert checkpoint.entries["blk.0.weight"].format == name


def test_experts_and_scale_dtype(write, rng):
    raw = blocks("Q4_K", rng, (2, N))
    path = write({"experts": (raw, kind_of("Q4_K"))})
    w = formats.open(path, scale_dtype=np.float16)["experts"]
    assert (w.scale.dtype, w.offset.dtype) == (np.float16, np.float16)
    expected = gguf.quants.dequantize(raw, kind_of("Q4_K"))
    np.testing.assert_allclose(w.dequantize(), expected, rtol=0, atol=np.abs(expected).max() * 2.0**-9)


def test_one_bit(tmp_path, rng, write):
    """gguf cannot read these: bit j of byte i is the sign of weight 8 i + j."""
    raw = blocks("Q1_0", rng)
    # gguf has no such type to write, so an F16 tensor gets the number of it.
    path = write({"t": np.zeros((N, BLOCKS * SIZES["Q1_0"] // 2), np.float16)})
    data = path.read_bytes()
    info = data.index(b"t" + b"\2\0\0\0")
    patched = bytearray(data)
    patched[info + 5 : info + 13] = int(BLOCKS * 128).to_bytes(8, "little")
    patched[info + 21 : info + 25] = (41).to_bytes(4, "little")
    patched[-(-(-raw.size // 32) * 32) :] = raw.tobytes()
    path.write_bytes(patched)
    split = raw.reshape(N, BLOCKS, 18)
    d = np.ascontiguousarray(split[..., :2]).view(np.float16).astype(np.float32)
    signs = np.unpackbits(split[..., 2:], axis=-1, bitorder="little") * 2.0 - 1
    np.testing.assert_array_equal(formats.open(path)["t"].dequantize(np.float32), (signs * d).reshape(N, -1))


@pytest.mark.parametrize("count", [1, 2])
def test_scale_of_nvfp4(count, write, rng):
    """An F32 tensor of its name multiplies: one for all experts, or one for each."""
    raw = blocks("NVFP4", rng, (2, N))
    scale = rng.uniform(0.5, 2, count).astype(np.float32)
    path = write({"up.weight": (raw, kind_of("NVFP4")), "up.scale": scale})
    w = formats.open(path)["up.weight"]
    split = raw.reshape(2, N, BLOCKS, 36)
    d = split[..., :4] & 0x7F  # ggml knows no sign of a scale, and takes 0x7F for 0
    d = np.where(d == 0x7F, 0, d).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    codes = split[..., 4:].reshape(2, N, BLOCKS, 4, 8)
    values = (
        codebooks.E2M1[np.concatenate([codes & 15, codes >> 4], axis=-1)] * d.astype(np.float32)[..., None]
    )
    np.testing.assert_array_equal(w.dequantize(), values.reshape(2, N, -1) * scale[:, None, None])


def test_arrays_are_views(write, rng):
    a = {
        "f32": rng.standard_normal((3, 4), np.float32),
        "f16": np.ones(5, np.float16),
        "i32": np.arange(4, dtype=np.int32),
    }
    checkpoint = formats.open(write(a))
    for name, array in a.items():
        np.testing.assert_array_equal(checkpoint[name], array)
        assert np.shares_memory(checkpoint[name], checkpoint[name])


def test_requantize(write, rng):
    raw = blocks("IQ2_XXS", rng)
    path = write({"t": (raw, kind_of("IQ2_XXS"))})
    with pytest.raises(
        NotImplementedError, match=r"model\.gguf: tensor t is IQ2_XXS, whose codes .* pass requantize="
    ):
        formats.open(path)["t"]
    assert "t" in formats.open(path)  # which does not read it
    w = formats.open(path, requantize={"bits": 8, "group_size": 32})["t"]
    assert isinstance(w, QuantizedTensor)
    expected = gguf.quants.dequantize(raw, kind_of("IQ2_XXS"))
    assert np.abs(np.asarray(w.dequantize()) - expected).max() < np.ptp(expected) / 255
    path = write({"row": (raw[0], kind_of("IQ2_XXS"))})
    assert formats.open(path, requantize={"bits": 8})["row"].shape == (1, expected.shape[-1])


@pytest.mark.parametrize(("type", "name"), [(9, "Q8_1"), (33, "Q4_0_8_8"), (999, "type 999")])
def test_a_type_that_is_not_read_leaves_the_others(type, name, write):
    path = write({"odd": np.ones((2, 32), np.int16), "t": np.arange(4, dtype=np.float32)})
    data = bytearray(path.read_bytes())
    at = data.index(b"odd") + 3 + 4 + 2 * 8  # behind its name: rank, sizes
    assert data[at] == 25  # I16
    data[at : at + 4] = type.to_bytes(4, "little")
    path.write_bytes(data)
    checkpoint = formats.open(path)
    assert checkpoint["t"].tolist() == [0, 1, 2, 3]
    assert checkpoint.entries["odd"].format == name
    with pytest.raises(
        NotImplementedError, match=rf"model\.gguf: tensor odd is {name}, which is not read here"
    ):
        checkpoint["odd"]


def test_folder(write, tmp_path):
    write({"t": np.ones(4, np.float32)})
    assert list(formats.open(tmp_path)) == ["t"]
