"""Families of safetensors: what their libraries wrote and read, and what this file packs from their definitions."""

import json
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxgemv
from jaxgemv import QuantizedTensor, codebooks, formats

pytestmark = pytest.mark.numerics

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
N, K, G = 32, 128, 4  # groups of 32
NAME = "layers.0.up"
WEIGHT = f"{NAME}.weight"


def pack(codes, bits, axis=-1):
    """int32 words of codes along an axis, bit by bit: the lowest first."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    stream = np.stack([codes >> b & 1 for b in range(bits)], axis=-1).reshape(*codes.shape[:-1], -1)
    stream = np.concatenate(
        [stream, np.zeros((*codes.shape[:-1], -stream.shape[-1] % 32), np.uint8)], axis=-1
    )
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


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


def wide(a, times=K // G):
    return np.repeat(np.asarray(a, np.float32), times, axis=-1)


# --- by the libraries ---

GOLDEN = np.load(Path(__file__).parent / "data/formats.npz")
MADE = list(dict.fromkeys(name.split("/")[0] for name in GOLDEN.files))


def golden(name, folder):
    """Written by golden_formats.py, which says by what; and the weight as that read it."""
    (folder / "model.safetensors").write_bytes(GOLDEN[f"{name}/file"].tobytes())
    (folder / "config.json").write_bytes(GOLDEN[f"{name}/config"].tobytes())
    if f"{name}/weight_bf16" in GOLDEN.files:
        return GOLDEN[f"{name}/weight_bf16"].view(BF16)
    return GOLDEN[f"{name}/weight"]


@pytest.mark.parametrize("name", [name for name in MADE if not name.endswith("axis0")])
def test_libraries(name, tmp_path):
    expected = golden(name, tmp_path)
    check(tmp_path, expected, name="a.b.experts.up" if name == "gpt_oss" else "a.b.weight")
    assert len(formats.open(tmp_path)) == 1 or name.startswith("ct")


def test_hqq_groups_along_outputs(tmp_path):
    expected = golden("hqq4_axis0", tmp_path)
    with pytest.raises(NotImplementedError, match=r"a\.b\.weight is hqq int4, with groups along the outputs"):
        formats.open(tmp_path)["a.b.weight"]
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


# --- float8 and float4 ---


@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 300), (64, 128)])
def test_deepseek(n, k, tmp_path, rng):
    """Blocks of 128 x 128, the last ones cut."""
    weight = rng.standard_normal((n, k)).astype(E4M3)
    scale = groups(rng, np.float32, (-(-n // 128), -(-k // 128)))
    tensors = {".weight": weight, ".weight_scale_inv": scale, ".bias": np.ones(n, np.float32)}
    folder = write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    by_weight = np.repeat(np.repeat(scale, 128, 0)[:n], 128, 1)[:, :k]
    w = check(folder, weight.astype(np.float32) * by_weight)
    assert w.scale.shape == ((n, -(-k // 128)) if scale.size > 1 else ())
    assert formats.open(folder).keys() == {WEIGHT, f"{NAME}.bias"}
    assert formats.open(folder, scale_dtype=BF16)[WEIGHT].scale.dtype == BF16


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((E4M3, shape) for shape in ((), (1,), (N,), (N, 1), (N, 2))), (ml_dtypes.float8_e5m2, (N, 1))],
)
def test_float8(dtype, shape, tmp_path, rng):
    weight, scale = rng.standard_normal((N, K)).astype(dtype), groups(rng, np.float32, shape)
    folder = write(tmp_path, {".weight": weight, ".weight_scale": scale})
    by_weight = wide(scale, 64) if shape == (N, 2) else scale.reshape(-1, 1)
    check(folder, weight.astype(np.float32) * by_weight)


def fp4(rng, lead=(N,), k=K):
    codes = rng.integers(0, 16, (*lead, k), np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, codebooks.E2M1[codes]


@pytest.mark.parametrize("lead", [(N,), (3, N)])
def test_nvfp4_of_modelopt(lead, tmp_path, rng):
    """w = FP4 * scale * scale_2; with a stack of experts too."""
    packed, values = fp4(rng, lead)
    scale = rng.uniform(1, 400, (*lead, K // 16)).astype(E4M3)
    second = rng.uniform(0.001, 0.002, lead[:-1]).astype(np.float32)
    folder = write(tmp_path, {".weight": packed, ".weight_scale": scale, ".weight_scale_2": second})
    (folder / "config.json").unlink()
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    check(folder, values * wide(scale, 16) * second[..., None, None])
    assert formats.open(folder).metadata["quantization"] == {"quant_algo": "NVFP4"}


def test_nvfp4_of_compressed_tensors_divides(tmp_path, rng):
    packed, values = fp4(rng)
    scale, by = rng.uniform(1, 400, (N, K // 16)).astype(E4M3), np.array([1344.0], np.float32)
    folder = write(tmp_path, {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": by})
    w = formats.open(folder)[WEIGHT]
    np.testing.assert_allclose(w.dequantize(), values * wide(scale, 16) / by, rtol=2.0**-22)


def test_infinities_come_without_a_warning(tmp_path, rng):
    packed, _ = fp4(rng)
    scale, by = np.ones((N, K // 16), E4M3), np.zeros(1, np.float32)
    folder = write(tmp_path, {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": by})
    assert np.isinf(formats.open(folder)[WEIGHT].global_scale)


def test_openai_names(tmp_path, rng):
    packed, values = fp4(rng, (2, N))
    scale = rng.integers(120, 130, (2, N, G), np.uint8)
    folder = write(tmp_path, {".blocks": packed.reshape(2, N, G, 16), ".scales": scale})
    check(folder, values * wide(scale.view(E8M0)), name=NAME)


# --- MLX ---


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(bits, tmp_path, rng):
    mx = pytest.importorskip("mlx.core")
    weight = mx.array(rng.standard_normal((N, K)).astype(np.float32))
    packed, scale, bias = mx.quantize(weight, group_size=32, bits=bits)
    expected = np.array(mx.dequantize(packed, scale, bias, group_size=32, bits=bits))
    tensors = {".weight": np.array(packed), ".scales": np.array(scale), ".biases": np.array(bias)}
    other = {"group_size": 64, "bits": 4, NAME: {"group_size": 32, "bits": bits}}
    folder = write(tmp_path, tensors, other)
    w = formats.open(folder)[WEIGHT]
    np.testing.assert_allclose(w.dequantize(), expected, atol=np.abs(expected).max() * 2.0**-22, rtol=0)
    assert w.offset is not None


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_mlx_floats(mode, tmp_path, rng):
    mx = pytest.importorskip("mlx.core")
    packed, scale = mx.quantize(mx.array(rng.standard_normal((N, K)).astype(np.float32)), mode=mode)
    expected = np.array(mx.dequantize(packed, scale, mode=mode, dtype=mx.float32))
    folder = write(tmp_path, {".weight": np.array(packed), ".scales": np.array(scale)}, {"mode": mode})
    check(folder, expected)


# --- bitsandbytes, torchao, AQLM ---


@pytest.mark.parametrize(("n", "k"), [(8, 64), (6, 96), (5, 63), (4, 25)])
def test_bitsandbytes_blocks_straddle_rows(n, k, tmp_path, rng):
    codes = rng.integers(0, 16, n * k + n * k % 2, np.uint8)
    packed = codes[::2] << 4 | codes[1::2]
    absmax = rng.uniform(0.1, 1, -(-n * k // 64)).astype(np.float32)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [n, k], "dtype": "float32"}).encode()
    tensors = {
        ".weight": packed[:, None],
        ".weight.absmax": absmax,
        ".weight.quant_map": codebooks.NF4,
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
    }
    expected = (codebooks.NF4[codes] * np.repeat(absmax, 64)[: codes.size])[: n * k].reshape(n, k)
    check(write(tmp_path, tensors), expected)


def test_llm_int8(tmp_path, rng):
    codes, scb = rng.integers(-127, 128, (N, K), np.int8), rng.uniform(1, 3, N).astype(np.float32)
    folder = write(tmp_path, {".weight": codes, ".SCB": scb, ".weight_format": np.zeros((), np.uint8)})
    w = formats.open(folder)[WEIGHT]
    np.testing.assert_allclose(w.dequantize(), codes * scb[:, None] / 127, rtol=2.0**-22)


def test_torchao_others_are_named(tmp_path):
    kind = {WEIGHT: json.dumps({"_type": "Int4TilePackedTo4dTensor"})}
    folder = write(tmp_path, {"._weight_qdata": np.zeros((1, 1, 32, 4), np.int32)}, metadata=kind)
    with pytest.raises(NotImplementedError, match="Int4TilePackedTo4dTensor"):
        formats.open(folder)[WEIGHT]


def test_aqlm(tmp_path, rng):
    codes = rng.integers(-128, 128, (N, K // 8, 2), np.int8)
    tables, scale = groups(rng, shape=(2, 256, 1, 8)), groups(rng, shape=(N, 1, 1, 1))
    folder = write(
        tmp_path, {".codes": codes, ".codebooks": tables, ".scales": scale}, {"quant_method": "aqlm"}
    )
    with pytest.raises(NotImplementedError, match=rf"{WEIGHT} is AQLM, whose codes .*; pass requantize="):
        formats.open(folder)[WEIGHT]
    vectors = sum(tables[i, codes[..., i].astype(int) % 256, 0].astype(np.float32) for i in range(2))
    expected = vectors.reshape(N, K) * scale.reshape(N, 1).astype(np.float32)
    w = formats.open(folder, requantize={"bits": 8})[WEIGHT]
    np.testing.assert_array_equal(w.dequantize(), jaxgemv.quantize(expected, bits=8).dequantize())


def test_int4_of_modelopt_is_named(tmp_path):
    folder = write(
        tmp_path, {".weight": np.zeros((4, 8), np.uint8), ".weight_scale": np.ones((8, 1), np.float32)}
    )
    with pytest.raises(NotImplementedError, match=f"{WEIGHT} is modelopt packed, with float32 scales"):
        formats.open(folder)[WEIGHT]


@pytest.mark.parametrize(
    ("name", "suffixes"), [("EXL3", ".trellis .suh"), ("EXL2", ".q_weight .q_scale"), ("QuIP#", ".Qidxs .SU")]
)
def test_named(name, suffixes, tmp_path):
    folder = write(tmp_path, {suffix: np.zeros((4, 4), np.int16) for suffix in suffixes.split()})
    with pytest.raises(NotImplementedError, match=f"{WEIGHT} is {name}"):
        formats.open(folder, requantize=True)[WEIGHT]


# --- ONNX ---


@pytest.mark.parametrize(
    ("bits", "zeros", "outside"),
    [
        (2, "codes", False),
        (4, None, False),
        (4, "codes", True),
        (4, "floats", False),
        (8, "codes", True),
        (8, None, False),
    ],
)
def test_onnx(bits, zeros, outside, tmp_path, rng):
    """Against onnxruntime, which multiplies an identity matrix. 80 columns are two blocks and a half."""
    onnx = pytest.importorskip("onnx")
    n, k, block = 6, 80, 32
    count = -(-k // block)
    codes = rng.integers(0, 1 << bits, (n, count * block), np.uint8)
    scale = groups(rng, np.float32, (n, count))
    tensors = {
        "up.weight_Q4": pack(codes, bits).view(np.uint8).reshape(n, count, -1),
        "up.weight_scales": scale.reshape(-1),
        "norm": np.ones(k, np.float32),
    }
    zero = rng.integers(0, 1 << bits, (n, count)).astype(np.uint8)
    if zeros == "codes":
        size = -(-count * bits // 8)
        tensors["up.zeros"] = np.ascontiguousarray(pack(zero, bits).view(np.uint8)[:, :size]).reshape(-1)
    elif zeros == "floats":
        tensors["up.zeros"] = zero.astype(np.float32).reshape(-1)
    else:
        zero = np.full((n, count), 1 << bits - 1)
    inputs = ["x", "up.weight_Q4", "up.weight_scales", *(["up.zeros"] if zeros else [])]
    node = onnx.helper.make_node(
        "MatMulNBits", inputs, ["y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block
    )
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_tensor_value_info("x", kind, ["rows", k])],
        [onnx.helper.make_tensor_value_info("y", kind, ["rows", n])],
        [onnx.numpy_helper.from_array(a, name) for name, a in tensors.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=outside, location="data.bin", size_threshold=0)
    w = check(path, (codes[:, :k] - wide(zero, block)[:, :k]) * wide(scale, block)[:, :k], name="up.weight")
    assert formats.open(path).keys() == {"up.weight", "norm"}
    np.testing.assert_array_equal(formats.open(path)["norm"], np.ones(k))

    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": np.eye(k, dtype=np.float32)})
    np.testing.assert_allclose(w.dequantize(), theirs.T, rtol=1e-5, atol=1e-6)


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
