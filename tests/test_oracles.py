"""Other people's packers, and a real model's weights: nothing below trusts our own idea of the format."""

import jax.numpy as jnp
import numpy as np
import pytest
from problems import Problem, unpack_bits
from tolerance import assert_close

from jaxgemv import QuantizedTensor, dequantize, gemv, pack, quantize

WIDTHS_OF_MLX = (2, 3, 4, 5, 6, 8)


@pytest.fixture
def mx():
    return pytest.importorskip("mlx.core")


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf")


def gemv_is_close(x, w, group, backend):
    p = Problem.of(x, w, group)
    assert_close(gemv(x, w, implementation=backend), p.answer(), p.magnitude(), p.k, dtype=x.dtype)
    return p


@pytest.mark.parametrize("bits", WIDTHS_OF_MLX)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_words_are_ours(mx, bits, group, backend, rng):
    """Its arrays serve as they are; its biases are our offset."""
    weight = rng.standard_normal((24, 384)).astype(np.float32)
    x = rng.standard_normal((3, 384)).astype(np.float32)
    arrays = mx.quantize(mx.array(weight), group_size=group, bits=bits)
    packed, scale, offset = map(np.array, arrays)
    w = QuantizedTensor(packed=packed, scale=scale, offset=offset, bits=bits)
    assert w.shape == (24, 384)

    p = gemv_is_close(x, w, group, backend)
    theirs = np.array(mx.dequantize(*arrays, group_size=group, bits=bits), np.float64)
    assert_close(dequantize(w), theirs, p.weight_magnitude(), 1, dtype=jnp.float32, factor=2)
    product = np.array(mx.quantized_matmul(mx.array(x), *arrays, group_size=group, bits=bits), np.float64)
    assert_close(gemv(x, w, implementation=backend), product, p.magnitude(), 384, dtype=jnp.float32, factor=2)


@pytest.mark.parametrize("bits", WIDTHS_OF_MLX)
def test_mlx_reads_ours(mx, bits, rng):
    w = quantize(rng.standard_normal((8, 128)).astype(np.float32), bits=bits, group_size=32)
    offset = -np.asarray(w.zero) * np.asarray(w.scale)
    arrays = (mx.array(np.asarray(a)) for a in (w.packed, w.scale, offset))
    theirs = np.array(mx.dequantize(*arrays, group_size=32, bits=bits), np.float64)
    magnitude = Problem.of(np.zeros((1, 128)), w, 32).weight_magnitude()
    assert_close(dequantize(w), theirs, magnitude, 1, dtype=jnp.float32, factor=2)


def blocks_of(gguf, name, weight, size):
    """(N, G, bytes of a block), and the float weight that gguf reads from them."""
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(weight, kind)
    return raw.reshape(len(weight), -1, size), gguf.quants.dequantize(raw, kind)


def half(raw):
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def nibbles(raw):
    """Code j in the low half of byte j, code j + 16 in the high half."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_blocks(gguf, name, backend, rng):
    """Every bit of every weight, after moving the codes; scales and offsets as they are."""
    bits = int(name[1])
    offset = name.endswith("1")
    codes_at = 4 if offset else 2
    weight = rng.standard_normal((10, 256)).astype(np.float32)
    blocks, expected = blocks_of(gguf, name, weight, codes_at + {4: 16, 5: 20, 8: 32}[bits])
    # Q8_0 is signed.
    codes = blocks[..., 2:] ^ 0x80 if bits == 8 else nibbles(blocks[..., -16:])
    if bits == 5:
        fifth = np.unpackbits(blocks[..., codes_at : codes_at + 4], axis=-1, bitorder="little")
        codes = codes | fifth << 4
    shift = {"offset": half(blocks[..., 2:4])} if offset else {}
    w = QuantizedTensor(
        packed=pack(codes.reshape(10, 256), bits), scale=half(blocks[..., :2]), bits=bits, **shift
    )
    np.testing.assert_array_equal(dequantize(w, jnp.float32), expected)
    gemv_is_close(rng.standard_normal((2, 256)).astype(np.float32), w, 32, backend)


@pytest.mark.parametrize("bits", range(1, 9))
def test_compressed_tensors_words_are_ours(bits, rng):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    signed = rng.integers(-(1 << bits - 1), 1 << bits - 1, (5, 96)).astype(np.int8)
    packed = helpers.pack_to_int32(torch.from_numpy(signed), bits).numpy().view(np.uint32)
    np.testing.assert_array_equal(pack(signed.astype(np.int32) + (1 << bits - 1), bits), packed)


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (3, 64), (8, None), (2, 16)])
@pytest.mark.parametrize("layer", ["attention.self.query", "intermediate.dense", "output.dense"])
@pytest.mark.parametrize("backend", ["cpu", "xla"], indirect=True)
def test_real_weights(minilm, layer, bits, group, backend):
    """Kernels on them, and what quantising costs: half a step for each weight, so a bound on each output."""
    weight = minilm[f"encoder.layer.3.{layer}.weight"]
    k = weight.shape[1]
    x = np.resize(minilm["embeddings.word_embeddings.weight"][1000:1008], (4, k)) * 10
    w = quantize(weight, bits=bits, group_size=group, method="minmax")
    p = gemv_is_close(x, w, group or k, backend)
    step = np.repeat(np.asarray(w.scale, np.float64).reshape(len(weight), -1), group or k, axis=1)
    loss = np.abs(weight - p.weight())
    # The step itself is rounded to float32.
    assert (loss <= step * (0.5 + (1 << bits) * 2.0**-22)).all()
    assert (np.abs(x @ weight.T.astype(np.float64) - p.answer()) <= np.abs(x) @ loss.T * (1 + 2.0**-40)).all()
    assert np.unique(unpack_bits(p.packed, bits, k)).size == 1 << bits  # all codes are in use
