"""What a config states and the tensors do not have, or have otherwise: refused, where it was read as something else."""

import json
import struct

import numpy as np
import pytest
from families import awq as awq_gemm
from families import compressed_tensors, gptq, gptq_act_order, pack, wide
from layers import BF16, E4M3, NAME, WEIGHT, G, K, N, check, groups, write
from safetensors.numpy import save_file

from jaxgemv import formats

pytestmark = pytest.mark.numerics


def scheme(**of_weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": of_weights}}}


@pytest.mark.parametrize(
    ("family", "without", "config", "match"),
    [
        (gptq, ".qzeros", {"quant_method": "gptq", "bits": 4, "sym": False}, "qzeros must be there"),
        (gptq_act_order, ".g_idx", {"quant_method": "gptq", "desc_act": True}, "g_idx must be there"),
        (awq_gemm, ".qzeros", {"quant_method": "awq", "zero_point": True}, "qzeros must be there"),
        (
            compressed_tensors,
            ".weight_zero_point",
            scheme(symmetric=False),
            "weight_zero_point must be there",
        ),
        (compressed_tensors, ".weight_g_idx", scheme(actorder="group"), "weight_g_idx must be there"),
    ],
)
def test_part_is_missing(family, without, config, match, tmp_path, rng):
    tensors, _ = family(rng.standard_normal((N, K)))
    tensors.pop(without, None)
    with pytest.raises(ValueError, match=match):
        formats.open(write(tmp_path, tensors, config))


@pytest.mark.parametrize("family", [gptq_act_order, awq_gemm])
def test_method_is_unknown(family, tmp_path, rng):
    """ParoQuant has AWQ's tensors, and turns x besides."""
    tensors, _ = family(rng.standard_normal((N, K)))
    checkpoint = formats.open(write(tmp_path, tensors, {"quant_method": "paroquant", "bits": 4}))
    with pytest.raises(NotImplementedError, match="of a method that is not known here"):
        checkpoint[WEIGHT]


def test_transform_of_x(tmp_path, rng):
    tensors, expected = compressed_tensors(rng.standard_normal((N, K)))
    fused = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    config = scheme(num_bits=4) | {"transform_config": {"config_groups": {"u": fused}}}
    check(write(tmp_path, tensors, config), expected)
    for other in (None, 3, {"apply": [3]}):  # which says nothing
        config["transform_config"]["config_groups"]["other"] = {"apply": other}
        check(write(tmp_path, tensors, config), expected)
    fused["apply"].append({"targets": ["Linear"], "location": "input", "inverse": True})
    with pytest.raises(NotImplementedError, match="with a transform of x or y"):
        formats.open(write(tmp_path, tensors, config))[WEIGHT]


def test_groups_that_divide_k(tmp_path, rng):
    """Two groups of 96 columns, not 128 and 64."""
    weight, scale = rng.standard_normal((N, 192)).astype(E4M3), groups(rng, np.float32, (N, 2))
    check(
        write(tmp_path, {".weight": weight, ".weight_scale": scale}),
        weight.astype(np.float32) * wide(scale, 96),
    )


def test_one_scale_of_a_stack(tmp_path, rng):
    weight = rng.standard_normal((3, N, K)).astype(E4M3)
    folder = write(tmp_path, {".weight": weight, ".weight_scale": np.float32(0.5)})
    check(folder, weight.astype(np.float32) * np.float32(0.5))


def test_blocks_of_modelopt(tmp_path, rng):
    weight, scale = rng.standard_normal((256, 384)).astype(E4M3), groups(rng, np.float32, (2, 1, 3, 1))
    by_weight = np.repeat(np.repeat(scale[:, 0, :, 0], 128, 0), 128, 1)
    folder = write(tmp_path, {".weight": weight, ".weight_scale": scale})
    check(folder, weight.astype(np.float32) * by_weight)


def test_codes_of_hqq_are_as_packed(tmp_path, rng):
    codes, scale = rng.integers(0, 256, (N * G, K // G), np.uint8), groups(rng, np.float32, (N * G, 1))
    tensors = {
        ".W_q": codes,
        ".scale": scale,
        ".zero": np.full_like(scale, 3),
        ".shape": np.array([N, K]),
        ".nbits": np.array(5),
        ".axis": np.array(1),
        ".packing": np.frombuffer(b"8bit_u8", np.uint8),
    }
    check(write(tmp_path, tensors), ((codes - np.float32(3)) * scale).reshape(N, K))


def test_groups_of_awq_gemv(tmp_path, rng):
    """A file of groups of 64, and a config that says 128."""
    n, k = 16, 1024
    tensors = {
        ".qweight": pack(rng.integers(0, 16, (n, k)), 4),
        ".qzeros": pack(rng.integers(0, 16, (n, 16)), 4),
        ".scales": groups(rng, np.float16, (n, 16)),
    }
    config = {"quant_method": "awq", "version": "gemv", "group_size": 64}
    assert formats.open(write(tmp_path, tensors, config))[WEIGHT].shape == (n, k)
    with pytest.raises(ValueError, match="scales must be of 8 groups of 128, padded; got 16"):
        formats.open(write(tmp_path, tensors, config | {"group_size": 128}))


def test_bits_of_gptq(tmp_path, rng):
    """Zeros of which half are missing are not those of two bits."""
    tensors, _ = gptq(rng.standard_normal((N, K)))
    tensors[".qzeros"] = tensors[".qzeros"][:, : N // 16]
    with pytest.raises(ValueError, match="qzeros must be of 4 bits, as the config has it; got 2"):
        formats.open(write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4}))


def test_auto_round_of_one_module(tmp_path, rng):
    """Symmetric or not unlike all others, in a packing whose zeros are not known."""
    tensors, _ = gptq(rng.standard_normal((N, K)))
    config = {
        "quant_method": "auto-round",
        "sym": True,
        "packing_format": "auto_round:gptqmodel",
        "extra_config": {NAME: {"sym": False}},
    }
    with pytest.raises(NotImplementedError, match="symmetric unlike the others of its file"):
        formats.open(write(tmp_path, tensors, config))[WEIGHT]


def test_bits_that_nothing_tells(tmp_path, rng):
    tensors = {
        ".weight_packed": pack(rng.integers(0, 16, (N, 8)), 4),
        ".weight_scale": groups(rng, BF16, (N, 1)),
        ".weight_shape": np.array([N, 8]),
    }
    with pytest.raises(ValueError, match="described with num_bits in the config"):
        formats.open(write(tmp_path, tensors))
    assert formats.open(write(tmp_path, tensors, scheme(num_bits=4)))[WEIGHT].bits == 4


def test_int8_of_one_dimension(tmp_path):
    tensors = {".weight": np.ones(8, np.int8), ".weight_scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match="weight must be of two dimensions at least"):
        formats.open(write(tmp_path, tensors))


def test_parts_without_an_index(tmp_path):
    save_file({"a": np.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match=r"there is no model-00002-of-00002\.safetensors"):
        formats.open(tmp_path)
    save_file({"b": np.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert formats.open(tmp_path).keys() == {"a", "b"}


def test_tensors_that_overlap(tmp_path):
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [first, first + 4]}
            for name, first in [("a", 0), ("b", 2)]
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    with pytest.raises(ValueError, match="data_offsets of tensor b must be 4 or more; got 2"):
        formats.open(path)


def test_gguf_key_twice(tmp_path):
    def text(of):
        return len(of).to_bytes(8, "little") + of

    key = text(b"llama.block_count") + struct.pack("<II", 4, 1)  # a uint32
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key + key + bytes(32))
    with pytest.raises(ValueError, match=r"key llama\.block_count must be there once; got two"):
        formats.open(path)


def onnx_model(path, weights, dense=()):
    """weights: of nodes MatMulNBits, (B, bits); all with the scales s."""
    onnx = pytest.importorskip("onnx")
    n, k = 16, 64
    arrays = {name: np.zeros((n, 2, 4 * bits), np.uint8) for name, bits in weights}
    arrays |= {"s": np.ones((n, 2), np.float32)} | {name: np.ones((k, n), np.float32) for name in dense}
    nodes = [
        onnx.helper.make_node(
            "MatMulNBits",
            ["x", name, "s"],
            [f"y{i}"],
            domain="com.microsoft",
            K=k,
            N=n,
            bits=bits,
            block_size=32,
        )
        for i, (name, bits) in enumerate(weights)
    ]
    initializers = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], initializers)), path)
    return path


@pytest.mark.parametrize(("weights", "dense"), [([("w_Q4", 4)], ["w"]), ([("w_Q4", 4), ("w_Q8", 8)], [])])
def test_onnx_names_that_meet(weights, dense, tmp_path):
    path = onnx_model(tmp_path / "model.onnx", weights, dense)
    with pytest.raises(ValueError, match="tensor w must be there once"):
        formats.open(path)


def test_onnx_order_and_sharing(tmp_path):
    path = onnx_model(tmp_path / "model.onnx", [("w_Q4", 4), ("w_Q4", 4)], [f"d{i}" for i in range(20)])
    assert list(formats.open(path)) == ["w", *[f"d{i}" for i in range(20)]]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="an ONNX model with a graph"):
        formats.open(path)
