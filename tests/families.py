"""Layers of a model as each family of safetensors stores them, packed from the definitions.

`FAMILIES[name]` is a function of a weight (N, K), which gives tensors by what follows the layer's name, and the weight
that they stand for; and the family's quantization_config.
"""

import json

import ml_dtypes
import numpy as np

from jaxgemv import codebooks

GROUP = 32


def pack(codes, bits, axis=-1):
    """int32 words of codes along an axis, bit by bit: the lowest first."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    stream = np.stack([codes >> b & 1 for b in range(bits)], axis=-1).reshape(*codes.shape[:-1], -1)
    stream = np.concatenate(
        [stream, np.zeros((*codes.shape[:-1], -stream.shape[-1] % 32), np.uint8)], axis=-1
    )
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def wide(a, times=GROUP):
    return np.repeat(np.asarray(a, np.float32), times, axis=-1)


def affine(w, bits=4):
    """Codes (N, K), integer zeros and float16 scales (N, G), and what they stand for."""
    groups = w.reshape(len(w), -1, GROUP)
    low, high = (np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0))
    scale = ((high - low) / (2**bits - 1)).astype(np.float16)
    zero = np.round(-low / scale.astype(np.float32)).clip(1, 2**bits - 1)
    codes = np.round(w / wide(scale) + wide(zero)).clip(0, 2**bits - 1)
    return codes.astype(np.uint8), zero.astype(np.uint8), scale, (codes - wide(zero)) * wide(scale)


def nearest(table, w, scale):
    """Codes of the table's entries times scale (N, K)."""
    return np.abs((w / scale)[..., None] - table).argmin(-1).astype(np.uint8)


def nibbles(codes):
    return codes[:, ::2] | codes[:, 1::2] << 4


def gptq(w):
    codes, zero, scale, expected = affine(w)
    qzeros = pack((zero - 1).T, 4)
    return {".qweight": pack(codes.T, 4, 0), ".qzeros": qzeros, ".scales": scale.T}, expected


def gptq_act_order(w):
    order = np.random.default_rng(0).permutation(w.shape[1])
    codes, *_ = affine(w[:, order])
    tensors, expected = gptq(w[:, order])
    back = np.argsort(order)
    tensors[".qweight"] = pack(codes[:, back].T, 4, 0)
    return tensors | {".g_idx": (back // GROUP).astype(np.int32)}, expected[:, back]


def awq(w):
    codes, zero, scale, expected = affine(w)

    def interleaved(a):
        return pack(a.reshape(len(a), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(a.shape), 4)

    return {".qweight": interleaved(codes.T), ".qzeros": interleaved(zero.T), ".scales": scale.T}, expected


def compressed_tensors(w):
    codes, zero, scale, expected = affine(w)
    tensors = {".weight_packed": pack(codes, 4), ".weight_scale": scale, ".weight_shape": np.array(w.shape)}
    return tensors | {".weight_zero_point": pack(zero, 4, 0)}, expected


def fp8(w):
    scale = np.full((-(-w.shape[0] // 128), -(-w.shape[1] // 128)), np.abs(w).max() / 448, np.float32)
    codes = (w / scale[0, 0]).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.astype(np.float32) * scale[0, 0]


def modelopt(w):
    second = np.float32(np.abs(w).max() / (6 * 448))
    top = np.abs(w.reshape(len(w), -1, 16)).max(-1)
    scale = (top / 6 / second).clip(2**-6).astype(ml_dtypes.float8_e4m3fn)
    by = wide(scale, 16) * second
    codes = nearest(codebooks.E2M1, w, by)
    tensors = {".weight": nibbles(codes), ".weight_scale": scale, ".weight_scale_2": second}
    return tensors, codebooks.E2M1[codes] * by


def mlx(w):
    codes, zero, scale, _ = affine(w)
    scale = scale.astype(np.float32)
    bias = -scale * zero
    tensors = {".weight": pack(codes, 4).view(np.uint32), ".scales": scale, ".biases": bias}
    return tensors, codes * wide(scale) + wide(bias)


def hqq(w):
    codes, zero, scale, expected = affine(w)
    grouped = codes.reshape(-1, GROUP)
    half = len(grouped) // 2
    tensors = {".W_q": grouped[:half] << 4 | grouped[half:], ".shape": np.array(w.shape)}
    tensors |= {".scale": scale.reshape(-1, 1), ".zero": zero.reshape(-1, 1).astype(np.float16)}
    tensors |= {".nbits": np.array(4), ".axis": np.array(1), ".packing": np.frombuffer(b"4bit_u8", np.uint8)}
    return tensors, expected


def bitsandbytes(w):
    blocks = w.reshape(-1, GROUP)
    absmax = np.abs(blocks).max(-1).astype(np.float32)
    codes = nearest(codebooks.NF4, blocks, absmax[:, None]).reshape(-1)
    state = {"quant_type": "nf4", "blocksize": GROUP, "shape": w.shape, "dtype": "float32"}
    tensors = {
        ".weight": (codes[::2] << 4 | codes[1::2])[:, None],
        ".weight.absmax": absmax,
        ".weight.quant_map": codebooks.NF4,
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return tensors, (codebooks.NF4[codes].reshape(blocks.shape) * absmax[:, None]).reshape(w.shape)


def torchao(w):
    codes, zero, scale, _ = affine(w)
    bias = (8 - zero.astype(np.float32)) * scale
    qdata = (nibbles(codes) ^ 0x88).view(np.int8)
    tensors = {"._weight_qdata": qdata, "._weight_scale": scale.astype(np.float32).T}
    return tensors | {"._weight_zero_point": bias.T}, (codes - wide(zero)) * wide(scale)


def dense(w):
    half = w.astype(ml_dtypes.bfloat16)
    return {".weight": half}, half.astype(np.float32)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FAMILIES = {
    "bfloat16": (dense, None),
    "gptq": (gptq, _GPTQ),
    "gptq_act_order": (gptq_act_order, _GPTQ | {"desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}),
    "compressed_tensors": (
        compressed_tensors,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
        },
    ),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mlx": (mlx, {"group_size": GROUP, "bits": 4}),
    "hqq": (hqq, {"quant_method": "hqq"}),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "torchao": (torchao, {"quant_method": "torchao"}),
}
