"""Families of safetensors packed by hand: float8 and float4, MLX, bitsandbytes, torchao and AQLM; and ONNX."""

import json

import ml_dtypes
import numpy as np
import pytest
from families import pack, wide
from layers import BF16, E4M3, E8M0, NAME, WEIGHT, G, K, N, check, groups, write

import jaxgemv
from jaxgemv import codebooks, formats

pytestmark = pytest.mark.numerics

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


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


@pytest.mark.parametrize(
    ("n", "k", "block"), [(200, 320, (64, 32)), (200, 192, (96, 96)), (96, 256, (128, 64))]
)
def test_blocks_of_compressed_tensors(n, k, block, tmp_path, rng):
    """Of the size that the config has for a group of modules."""
    weight = rng.standard_normal((n, k)).astype(E4M3)
    scale = groups(rng, np.float32, (-(-n // block[0]), -(-k // block[1])))
    by_weight = np.repeat(np.repeat(scale, block[0], 0)[:n], block[1], 1)[:, :k]
    for stated in (list(block), "x".join(map(str, block))):
        scheme = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": stated}
        config = COMPRESSED | {"config_groups": {"group_0": {"weights": scheme}}}
        folder = write(tmp_path, {".weight": weight, ".weight_scale": scale}, config)
        check(folder, weight.astype(np.float32) * by_weight)


@pytest.mark.parametrize(("width", "group"), [(12, 32), (8, 50)])
def test_groups_beside_blocks(width, group, tmp_path, rng):
    """Of a model in which others have blocks; the config may say the size of groups."""
    weight, scale = rng.standard_normal((256, 384)).astype(E4M3), groups(rng, np.float32, (256, width))
    schemes = {"block_structure": [128, 128]}, {"group_size": group}
    config_groups = {f"group_{i}": {"weights": scheme} for i, scheme in enumerate(schemes)}
    folder = write(tmp_path, {".weight": weight, ".weight_scale": scale}, {"config_groups": config_groups})
    check(folder, weight.astype(np.float32) * np.repeat(scale, group, 1)[:, :384])


@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (3, 2)])
def test_blocks_of_another_size_than_stated(shape, tmp_path, rng):
    tensors = {".weight": np.ones((256, 384), E4M3), ".weight_scale_inv": groups(rng, np.float32, shape)}
    folder = write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match=r"one for each block of 128 x 128 in \(256, 384\); got"):
        formats.open(folder)


def test_two_scales(tmp_path, rng):
    scale = groups(rng, np.float32, (N, 1))
    folder = write(
        tmp_path, {".weight": np.ones((N, K), E4M3), ".weight_scale": scale, ".weight_scale_inv": scale}
    )
    with pytest.raises(ValueError, match="weight_scale must be the only one"):
        formats.open(folder)


@pytest.mark.parametrize("dtype", [E4M3, np.int8])
def test_scales_of_x_are_named(dtype, tmp_path, rng):
    """ModelOpt's: the product alone would be another."""
    tensors = {".weight": np.ones((N, K), dtype), ".weight_scale": groups(rng, np.float32, (N, 1))}
    folder = write(tmp_path, tensors | {".pre_quant_scale": np.ones(K, np.float32)})
    with pytest.raises(NotImplementedError, match="with a scale of x"):
        formats.open(folder)[WEIGHT]


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


def test_nvfp4_without_a_global_scale(tmp_path, rng):
    folder = write(tmp_path, {".weight_packed": fp4(rng)[0], ".weight_scale": np.ones((N, K // 16), E4M3)})
    with pytest.raises(ValueError, match="weight_global_scale must be there"):
        formats.open(folder)


def test_packed_and_dense(tmp_path, rng):
    packed, scale = fp4(rng)[0], np.ones((N, K // 32), np.uint8)
    folder = write(
        tmp_path, {".weight_packed": packed, ".weight_scale": scale, ".weight": np.ones((N, K), np.float32)}
    )
    with pytest.raises(ValueError, match="weight must be there once"):
        formats.open(folder)


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


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
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


def test_bitsandbytes_experts(tmp_path, rng):
    """A parameter of its own name, and a stack."""
    shape = 3, N, K
    codes = rng.integers(0, 16, shape, np.uint8)
    absmax = rng.uniform(0.1, 1, codes.size // 64).astype(np.float32)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": shape, "dtype": "float32"}).encode()
    tensors = {
        "": (codes[..., ::2] << 4 | codes[..., 1::2]).reshape(-1, 1),
        ".absmax": absmax,
        ".quant_map": codebooks.NF4,
        ".quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
    }
    expected = codebooks.NF4[codes] * np.repeat(absmax, 64).reshape(shape)
    check(write(tmp_path, tensors), expected, name=NAME)


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
