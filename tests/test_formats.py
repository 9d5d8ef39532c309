"""Families of safetensors: what their libraries wrote and read; GPTQ, AWQ and compressed-tensors packed by hand."""

import json
import struct

import jax
import numpy as np
import pytest
from families import pack, wide
from layers import BF16, MADE, WEIGHT, G, K, N, check, golden, groups, write

import jaxgemv
from jaxgemv import formats

pytestmark = pytest.mark.numerics

# --- by the libraries ---


@pytest.mark.parametrize("name", [name for name in MADE if not name.endswith("axis0")])
def test_libraries(name, tmp_path):
    expected = golden(name, tmp_path)
    check(tmp_path, expected, name="a.b.experts.up" if name == "gpt_oss" else "a.b.weight")
    assert len(formats.open(tmp_path)) == 1 or name.startswith("ct")


def test_hqq_groups_along_outputs(tmp_path):
    expected = golden("hqq4_axis0", tmp_path)
    with pytest.raises(NotImplementedError, match=r"a\.b\.weight is hqq int4, with groups along the outputs"):
        formats.open(tmp_path)["a.b.weight"]
    with pytest.raises(TypeError, match=r"formats\.open: requantize's arguments must be .*; got bit$"):
        formats.open(tmp_path, requantize={"bit": 8})
    for given, text in (({"bits": 9}, "bits must be"), ({"format": "nf5"}, "format must be")):
        with pytest.raises(ValueError, match=rf"formats\.open: requantize: {text}"):
            formats.open(tmp_path, requantize=given)
    with pytest.raises(ValueError, match=r"formats\.open: requantize must not have in_axis"):
        formats.open(tmp_path, requantize={"in_axis": 0})
    w = formats.open(tmp_path, requantize={"bits": 8, "group_size": 32})["a.b.weight"]
    assert np.abs(np.asarray(w.dequantize()) - expected).max() < np.ptp(expected) / 255


# --- GPTQ and AWQ ---


@pytest.mark.parametrize(
    ("bits", "form"), [(2, "gptq"), (3, "gptq"), (4, "gptq"), (8, "gptq"), (3, "gptq_v2"), (4, "gptq_v2")]
)
def test_gptq(bits, form, tmp_path, rng):
    """Also a zero of 0, which version 1 stores as the largest code."""
    codes = rng.integers(0, 1 << bits, (N, K))
    zero = rng.integers(0, 1 << bits, (N, G))
    zero[0, 0] = 0
    scale = groups(rng)
    stored = zero if form == "gptq_v2" else (zero - 1) % (1 << bits)
    tensors = {".qweight": pack(codes.T, bits, 0), ".qzeros": pack(stored.T, bits), ".scales": scale.T}
    tensors[".g_idx"] = np.arange(K, dtype=np.int32) // 32
    folder = write(tmp_path, tensors, {"quant_method": "gptq", "bits": bits, "checkpoint_format": form})
    w = check(folder, (codes - wide(zero)) * wide(scale))
    assert w.perm is None


@pytest.mark.parametrize("stored", [7, 8])
def test_gptq_symmetric_whatever_it_says(stored, tmp_path, rng):
    codes, scale = rng.integers(0, 16, (N, K)), groups(rng)
    zeros = pack(np.full((G, N), stored), 4)
    folder = write(
        tmp_path,
        {".qweight": pack(codes.T, 4, 0), ".qzeros": zeros, ".scales": scale.T},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"},
    )
    assert check(folder, (codes - np.float32(8)) * wide(scale)).zero is None


@pytest.mark.parametrize("name", ["auto-round", "intel/auto-round"])
def test_gptq_of_auto_round(name, tmp_path, rng):
    """Without g_idx and by another name; shapes tell it from AWQ's."""
    codes, zero, scale = (
        rng.integers(0, 16, (64, K)),
        rng.integers(1, 16, (64, G)),
        groups(rng, shape=(64, G)),
    )
    tensors = {".qweight": pack(codes.T, 4, 0), ".qzeros": pack(zero.T - 1, 4), ".scales": scale.T}
    config = {"quant_method": name, "bits": 4, "group_size": 32}
    folder = write(tmp_path, tensors, config | {"packing_format": "auto_round:auto_gptq"})
    check(folder, (codes - wide(zero)) * wide(scale))
    folder = write(tmp_path, tensors, config | {"packing_format": "auto_round"})
    with pytest.raises(NotImplementedError, match=r"whose zeros are not known here \('auto_round'\)"):
        formats.open(folder)[WEIGHT]
    tensors[".qzeros"] = pack(np.full((G, 64), 8), 4)
    folder = write(tmp_path, tensors, config | {"packing_format": "auto_round", "sym": True})
    check(folder, (codes - np.float32(8)) * wide(scale))


def test_gptq_stack_is_named(tmp_path):
    tensors = {".qweight": np.zeros((2, 16, 64), np.int32), ".scales": np.ones((2, 4, 64), np.float16)}
    folder = write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(NotImplementedError, match="gptq, with a weight of 3 dimensions"):
        formats.open(folder)[WEIGHT]


@pytest.mark.parametrize("stated", [0, -1])
def test_awq_of_one_group(stated, tmp_path, rng):
    codes, scale = rng.integers(0, 16, (N, K)), groups(rng, shape=(N, 1))
    interleaved = codes.T.reshape(K, -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(K, N)
    tensors = {".qweight": pack(interleaved, 4), ".scales": scale.T}
    config = {"quant_method": "awq", "bits": 4, "group_size": stated, "version": "gemm"}
    check(write(tmp_path, tensors, config), (codes - np.float32(8)) * scale)


def test_gptq_act_order(tmp_path, rng):
    """Equal groups are a permutation; others are named, and can be converted."""
    codes, scale = rng.integers(0, 16, (N, K)), groups(rng)
    for equal in (True, False):
        g_idx = rng.permutation(np.arange(K) // 32) if equal else np.minimum(np.arange(K) // 31, 3)
        expected = (codes - np.float32(8)) * scale[:, g_idx].astype(np.float32)
        tensors = {".qweight": pack(codes.T, 4, 0), ".scales": scale.T, ".g_idx": g_idx.astype(np.int32)}
        folder = write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "sym": True})
        if equal:
            assert check(folder, expected).perm is not None
            continue
        with pytest.raises(NotImplementedError, match="groups of different sizes; pass requantize="):
            formats.open(folder)[WEIGHT]
        w = formats.open(folder, requantize={"bits": 8, "group_size": 16})[WEIGHT]
        assert np.abs(np.asarray(w.dequantize()) - expected).max() < 2.5 / 255


def test_gptq_of_a_kernel(tmp_path):
    folder = write(
        tmp_path,
        {".qweight": np.zeros((8, 64), np.int32), ".scales": np.ones((1, 64), np.float16)},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    )
    with pytest.raises(NotImplementedError, match="marlin"):
        formats.open(folder)[WEIGHT]


def test_awq_gemm(tmp_path, rng):
    codes, zero, scale = rng.integers(0, 16, (K, N)), rng.integers(0, 16, (G, N)), groups(rng, shape=(G, N))

    def interleaved(a):
        return pack(a.reshape(len(a), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(a.shape), 4)

    tensors = {".qweight": interleaved(codes), ".qzeros": interleaved(zero), ".scales": scale}
    folder = write(tmp_path, tensors, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32})
    check(folder, (codes.T - wide(zero.T)) * wide(scale.T))


def test_awq_gemv(tmp_path, rng):
    """Zeros and scales are padded to 8 i groups."""
    codes, zero, scale = rng.integers(0, 16, (N, K)), rng.integers(0, 16, (N, 8)), groups(rng, shape=(N, 8))
    tensors = {".qweight": pack(codes, 4), ".qzeros": pack(zero, 4), ".scales": scale}
    folder = write(
        tmp_path, tensors, {"quant_method": "awq", "version": "gemv", "w_bit": 4, "q_group_size": 32}
    )
    check(folder, (codes - wide(zero[:, :G])) * wide(scale[:, :G]))


# --- compressed-tensors ---


@pytest.mark.parametrize(
    ("bits", "old"), [*((bits, False) for bits in range(1, 9)), *((bits, True) for bits in (3, 5, 6, 7))]
)
def test_pack_quantized(bits, old, tmp_path, rng):
    """Up to 0.17.1 a word held whole codes only."""
    n, k = 10, 144
    codes, zero = rng.integers(0, 1 << bits, (n, k)), rng.integers(0, 1 << bits, (n, 6))
    scale = groups(rng, BF16, (n, 6))

    def words(a, axis):
        if not old:
            return pack(a, bits, axis)
        a = np.moveaxis(a, axis, -1).astype(np.uint32)
        count = 32 // bits
        a = np.pad(a, ((0, 0), (0, -a.shape[1] % count))).reshape(len(a), -1, count)
        packed = np.bitwise_or.reduce(a << np.arange(count, dtype=np.uint32) * np.uint32(bits), axis=-1)
        return np.moveaxis(packed.view(np.int32), -1, axis)

    tensors = {
        ".weight_packed": words(codes, 1),
        ".weight_zero_point": words(zero, 0),
        ".weight_scale": scale,
    }
    tensors[".weight_shape"] = np.array([n, k])
    arguments = {"num_bits": bits, "group_size": 24}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": arguments}},
    }
    folder = write(tmp_path, tensors, quantization)
    check(folder, (codes - wide(zero, 24)) * wide(scale, 24))


def test_int_quantized_with_zeros(tmp_path, rng):
    codes, zero = rng.integers(-128, 128, (N, 30), np.int8), rng.integers(-128, 128, (N, 1), np.int8)
    scale = groups(rng, BF16, (N, 1))
    tensors = {".weight": codes, ".weight_zero_point": zero, ".weight_scale": scale}
    folder = write(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "int-quantized"})
    check(folder, (codes.astype(np.float32) - zero) * scale.astype(np.float32))


def test_other_packings_are_named(tmp_path):
    tensors = {".weight_packed": np.zeros((8, 64), np.int32), ".weight_scale": np.ones((1, 64), np.float16)}
    folder = write(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "marlin-24"})
    with pytest.raises(NotImplementedError, match="marlin-24"):
        formats.open(folder)[WEIGHT]


# --- all together ---


@pytest.mark.parametrize("name", ["ct_int4", "ct_nvfp4", "ct_mxfp4", "ct_fp8", "gpt_oss"])
def test_views(name, tmp_path):
    """Same-bytes formats are not copied: what is loaded twice is the same memory."""
    golden(name, tmp_path)
    checkpoint = formats.open(tmp_path)
    (weight,) = [
        name
        for name, entry in checkpoint.entries.items()
        if entry.format != entry.shape and len(entry.shape) > 1
    ]
    one, other = checkpoint[weight], checkpoint[weight]
    assert np.shares_memory(one.packed, other.packed)
    assert np.shares_memory(one.scale, other.scale)


def test_views_of_transposed_words_and_mlx(tmp_path, rng):
    codes, scale = rng.integers(0, 16, (N, K)), groups(rng)
    gptq = {".qweight": pack(codes.T, 4, 0), ".scales": scale.T}
    awq = {
        ".qweight": pack(codes, 4),
        ".qzeros": pack(np.ones((N, 8)), 4),
        ".scales": groups(rng, shape=(N, 8)),
    }
    mlx = {".weight": pack(codes, 4).view(np.uint32), ".scales": scale, ".biases": scale}
    settings = {"bits": 4, "group_size": 32, "sym": True}
    for method, tensors in (("gptq", gptq), ("awq", awq), ("mlx", mlx)):
        checkpoint = formats.open(write(tmp_path, tensors, {**settings, "quant_method": method}))
        assert np.shares_memory(checkpoint[WEIGHT].packed, checkpoint[WEIGHT].packed), method


@pytest.mark.parametrize("name", ["gptq4", "ct_nvfp4", "ct_fp8", "bnb_nf4", "hqq3_axis1", "awq_gemv_fast"])
def test_product(name, tmp_path, rng):
    """What was opened serves as it is, jitted."""
    expected = golden(name, tmp_path).astype(np.float32)
    w = formats.open(tmp_path)["a.b.weight"]
    x = rng.standard_normal((3, expected.shape[1])).astype(np.float32)
    # Some libraries round to bfloat16.
    bound = np.abs(x) @ np.abs(expected).T * (2.0**-8 if name.startswith(("ct", "bnb")) else 2.0**-20)
    assert (np.abs(jax.jit(jaxgemv.gemv)(x, w) - x @ expected.T) <= bound).all()


def test_stated_twice(tmp_path):
    tensors = {".qweight": pack(np.zeros((32, 8)), 4, 0), ".scales": np.ones((1, 8), np.float16)}
    folder = write(tmp_path, {**tensors, ".weight": np.ones(4)}, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="must be there once"):
        formats.open(folder)


def test_header_is_read_by_hand(tmp_path):
    """The layout itself, and not what a library makes of it."""
    header = json.dumps({"t": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\x80\x3f\x00\xc0")
    np.testing.assert_array_equal(formats.open(path)["t"], np.array([1, -2], BF16))
