"""Makes data/formats.npz: small checkpoints by the libraries that define their formats, and the weights they read.

    python -P tests/golden_formats.py SOURCES     # of gptqmodel, as its sdist has them

Last run with torch 2.13.0, auto-gptq 0.7.1, gptqmodel 7.7.0, compressed-tensors 0.20.0, bitsandbytes 0.50.2,
hqq 0.2.8.post1, torchao 0.18.0, transformers 5.23.0 and safetensors 0.8.0, on a CPU. test_formats.py reads the result
and needs none of them.
"""

import ast
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

MADE = {}
N, K = 8, 64
torch.manual_seed(20251)


def weights(n=N, k=K):
    return torch.randn(n, k)


def record(name, tensors, weight, config, metadata=None):
    """tensors: of the layer "a.b". weight: as the library computes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        plain = {f"a.b.{key}" if key else "a.b": value.contiguous() for key, value in tensors.items()}
        save_file(plain, path, metadata)
        MADE[f"{name}/file"] = np.frombuffer(path.read_bytes(), np.uint8)
    MADE[f"{name}/config"] = np.frombuffer(json.dumps(config).encode(), np.uint8)
    narrow = weight.dtype == torch.bfloat16
    MADE[f"{name}/weight{'_bf16' if narrow else ''}"] = (
        weight.view(torch.uint16).numpy() if narrow else weight.detach().numpy()
    )


def by_path(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gptq():
    file = next(
        f
        for f in importlib.metadata.files("auto-gptq")
        if f.name == "qlinear_cuda.py" and "old" not in f.name
    )
    linear = by_path(file.locate()).QuantLinear
    n = k = 32  # rows of whole words
    for bits, group, act_order in ((2, 16, False), (3, 16, False), (4, 16, True), (8, 32, False)):
        layer = linear(bits, group, k, n, bias=False, weight_dtype=torch.float32)
        dense = torch.nn.Linear(k, n, bias=False)
        order = torch.randperm(k) if act_order else torch.arange(k)
        g_idx = (order // group).to(torch.int32)
        scales = (torch.rand(n, k // group) * 0.1 + 0.01).half().float()
        zeros = torch.randint(1, 1 << bits, (n, k // group)).float()
        codes = torch.randint(0, 1 << bits, (n, k))
        dense.weight.data = (codes - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
        layer.pack(dense, scales, zeros, g_idx)
        tensors = {key: value for key, value in layer.state_dict().items() if value is not None}
        tensors["scales"] = tensors["scales"].half()
        config = {
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": False,
            "quant_method": "gptq",
        }
        record(f"gptq{bits}", tensors, layer(torch.eye(k)).T.contiguous(), {"quantization_config": config})


def awq(sources):
    package = Path(sources) / "gptqmodel"
    packing = by_path(package / "quantization/awq/utils/packing_utils.py")
    codes = torch.randint(0, 16, (K, N), dtype=torch.int32)
    zeros = torch.randint(0, 16, (K // 32, N), dtype=torch.int32)
    scales = (torch.rand(K // 32, N) * 0.1).half()
    qweight, qzeros = packing.pack_awq(codes, zeros, 4)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    weight = packing.dequantize_gemm(qweight, qzeros, scales.float(), 4, 32).T.contiguous()
    record("awq_gemm", tensors, weight, {"quantization_config": config})

    text = (package / "nn_modules/qlinear/gemv_fast_awq.py").read_text()
    function = next(f for f in ast.parse(text).body if getattr(f, "name", "") == "pack_intweight")
    space = {"torch": torch}
    exec(compile(ast.Module([function], []), "gemv_fast_awq.py", "exec"), space)
    k = 128
    codes = torch.randint(0, 16, (8, k), dtype=torch.int32)
    scales, offsets = (torch.rand(8, 8) * 0.1).half(), (torch.rand(8, 8) - 1).half()
    tensors = {"qweight": space["pack_intweight"](codes, 4, 64), "scales": scales, "qzeros": offsets}
    by_group = [a[: k // 32].float().T.repeat_interleave(32, 1) for a in (scales, offsets)]
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv_fast"}
    record("awq_gemv_fast", tensors, codes * by_group[0] + by_group[1], {"quantization_config": config})


def compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def one(name, form, state, **arguments):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        compressor = BaseCompressor.get_value_from_registry(form)
        small = compressor.compress(dict(state), scheme)
        group = {"group_0": {"targets": ["Linear"], "weights": json.loads(scheme.weights.model_dump_json())}}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": group}
        weight = compressor.decompress(dict(small), scheme)["weight"]
        record(name, small, weight, {"quantization_config": config})

    for bits, symmetric in ((3, False), (4, True), (8, False)):
        state = {"weight": weights().bfloat16(), "weight_scale": (torch.rand(N, 2) * 0.1 + 0.05).bfloat16()}
        if not symmetric:
            state["weight_zero_point"] = torch.randint(
                -(1 << bits - 1), 1 << bits - 1, (N, 2), dtype=torch.int8
            )
        arguments = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "group",
            "group_size": 32,
        }
        one(f"ct_int{bits}", "pack-quantized", state, **arguments)
    total = torch.tensor([448 * 6 / 4.0])
    state = {"weight": weights().bfloat16(), "weight_global_scale": total}
    state["weight_scale"] = (total * state["weight"].float().reshape(N, 4, 16).abs().amax(-1) / 6).clamp(
        max=448
    )
    state["weight_scale"] = state["weight_scale"].to(torch.float8_e4m3fn).bfloat16()
    arguments = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    one("ct_nvfp4", "nvfp4-pack-quantized", state, **arguments)
    state = {"weight": weights().bfloat16(), "weight_scale": (2.0 ** torch.randint(-3, 2, (N, 2))).bfloat16()}
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    one("ct_mxfp4", "mxfp4-pack-quantized", state, scale_dtype=torch.uint8, **arguments)
    state = {"weight": weights().bfloat16(), "weight_scale": (torch.rand(N, 1) * 0.1 + 0.01).bfloat16()}
    one("ct_fp8", "float-quantized", state, num_bits=8, type="float", symmetric=True, strategy="channel")
    one("ct_int8", "int-quantized", state, num_bits=8, type="int", symmetric=True, strategy="channel")


def bitsandbytes():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for kind, nested in (("nf4", False), ("fp4", False), ("nf4", True)):
        packed, state = quantize_4bit(
            weights().bfloat16(), blocksize=64, quant_type=kind, compress_statistics=nested
        )
        tensors = {"weight": packed, **{f"weight.{key}": a for key, a in state.as_dict(packed=True).items()}}
        config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        record(f"bnb_{kind}{'_nested' * nested}", tensors, dequantize_4bit(packed, state), config)


def hqq():
    from hqq.core.quantize import Quantizer
    from hqq.core.utils import encode_safetensor_type

    for bits, axis in ((8, 1), (4, 1), (3, 1), (2, 1), (1, 1), (4, 0)):
        w_q, meta = Quantizer.quantize(
            weights(), nbits=bits, group_size=32, axis=axis, device="cpu", compute_dtype=torch.float32
        )
        meta["compute_dtype"] = torch.float32
        weight = Quantizer.dequantize(w_q, meta)
        tensors = {"W_q": w_q, **{key: encode_safetensor_type(a) for key, a in meta.items()}}
        tensors = {key: a.data for key, a in tensors.items() if a is not None}
        config = {"quantization_config": {"quant_method": "hqq"}}
        record(f"hqq{bits}_axis{axis}", tensors, weight.reshape(N, K), config)


def torchao():
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor

    codes = torch.randint(-8, 8, (N, K), dtype=torch.int32)
    scale, zero = torch.rand(K // 32, N).bfloat16(), torch.randn(K // 32, N).bfloat16()
    qdata = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    w = Int4Tensor(qdata, scale, zero, [1, 32], (N, K))
    tensors, metadata = flatten_tensor_state_dict({"a.b.weight": w})
    tensors = {key.removeprefix("a.b."): a for key, a in tensors.items()}
    by_group = [a.float().T.repeat_interleave(32, 1) for a in (scale, zero)]
    record("torchao", tensors, codes * by_group[0] + by_group[1], {}, metadata)


def gpt_oss():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 8, 2), dtype=torch.uint8)
    weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2).contiguous()
    record("gpt_oss", {"experts.up_blocks": blocks, "experts.up_scales": scales}, weight, {})


if __name__ == "__main__":
    gptq()
    awq(sys.argv[1])
    compressed_tensors()
    bitsandbytes()
    hqq()
    torchao()
    gpt_oss()
    np.savez_compressed(Path(__file__).parent / "data/formats.npz", **MADE)
