"""The packed format: literal bytes first, then pack, unpack, QuantizedTensor."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make, pack_bits, unpack_bits
from tolerance import assert_close

from jaxgemv import QuantizedTensor, dequantize, gemv, pack, unpack

# The worked examples of docs/format.md: bits, codes, words, bytes, scale, zero, weights.
EXAMPLES = (
    (
        3,
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 6],
        [0x88FAC688, 0x00000001],  # the last code straddles the words
        "88 c6 fa 88 01 00 00 00",
        0.5,
        None,
        [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, -2.0, -1.5, 1.0],
    ),
    (
        4,
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15],
        [0x76543210, 0x00000F98],
        "10 32 54 76 98 0f 00 00",
        0.25,
        6,
        [-1.5, -1.25, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 2.25],
    ),
)
examples = pytest.mark.parametrize("example", EXAMPLES, ids=["int3", "int4"])


@examples
def test_golden_bytes(example):
    bits, codes, words, raw, *_ = example
    packed = pack(np.array([codes]), bits)
    assert packed.dtype == jnp.uint32
    np.testing.assert_array_equal(packed, np.array([words], np.uint32))
    assert np.asarray(packed).tobytes() == bytes.fromhex(raw)
    np.testing.assert_array_equal(unpack(np.array([words], np.uint32), bits, 11), [codes])


@examples
def test_golden_weights(example):
    bits, _, words, raw, scale, zero, weights = example
    zero = None if zero is None else np.float32(zero)
    for packed in (np.array([words], np.uint32), np.frombuffer(bytes.fromhex(raw), np.uint8)[None]):
        w = QuantizedTensor(packed=packed, scale=np.float32(scale), zero=zero, bits=bits, k=11)
        np.testing.assert_array_equal(dequantize(w), [weights])
        np.testing.assert_array_equal(gemv(np.eye(11, dtype=np.float32), w)[:, 0], weights)


@examples
def test_docs_show_the_same(example):
    text = (Path(__file__).parents[1] / "docs/format.md").read_text()
    _, codes, words, raw, _, _, weights = example
    for line in (
        ", ".join(map(str, codes)),
        " ".join(f"0x{w:08x}" for w in words),
        raw,
        ", ".join(map(str, weights)),
    ):
        assert line in text


@pytest.mark.parametrize(
    ("bits", "k"), [*((bits, 33) for bits in range(1, 9)), (3, 1), (4, 1), (5, 100), (8, 100)]
)
def test_pack_every_width(bits, k, rng):
    codes = rng.integers(0, 1 << bits, (2, 3, k))
    packed = pack(codes, bits)
    np.testing.assert_array_equal(packed, pack_bits(codes, bits))
    np.testing.assert_array_equal(unpack(packed, bits, k), codes)
    np.testing.assert_array_equal(unpack(np.asarray(packed).view(np.uint8), bits, k), codes)


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_pack_dtypes(dtype):
    """Signed code dtypes are shifted to 0 ..; every other holds the codes themselves."""
    codes = np.arange(16)
    signed = dtype in ("int4", "int8")
    array = (codes - 8 * signed).astype(jnp.dtype(dtype))
    array = array if dtype.endswith("64") else jnp.asarray(array)
    np.testing.assert_array_equal(unpack(pack(array, 4), 4, 16), codes)


def test_pack_wide_integers_under_jit(x64):
    """What jnp.arange gives where JAX has 64 bits."""
    with x64:
        codes = jnp.arange(8)
        assert codes.dtype == jnp.int64
        packed = jax.jit(lambda codes: pack(codes, 4))(codes)
    np.testing.assert_array_equal(packed, [0x76543210])


def test_pack_under_jit():
    codes = jnp.arange(16, dtype=jnp.uint8)
    np.testing.assert_array_equal(jax.jit(pack, static_argnums=1)(codes, 4), pack(codes, 4))
    np.testing.assert_array_equal(jax.jit(pack, static_argnums=1)(codes + 16, 4), pack(codes, 4))
    words = jax.ShapeDtypeStruct((2, 3), jnp.uint32)
    out = jax.eval_shape(lambda w: unpack(w, 3, 30), words)
    assert (out.shape, out.dtype) == ((2, 30), jnp.uint8)


@pytest.mark.parametrize("form", ["mid", "zero", "fraction", "integer", "offset"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dequantize(form, dtype, rng):
    p = make(rng, 5, dtype, Case(1, 6, 50, 16, form))
    for out in (None, jnp.float32):
        w = dequantize(p.tensor, out)
        # A weight is the product with a one.
        assert_close(w, p.weight(), p.weight_magnitude(), 1, dtype=out or dtype)
    np.testing.assert_array_equal(p.tensor.dequantize(), dequantize(p.tensor))


def test_tensor_properties(rng):
    p = make(rng, 4, "bfloat16", Case(1, 6, 64, 16, "zero"))
    w = p.tensor
    assert (w.shape, w.ndim, w.dtype, w.bits) == ((6, 64), 2, jnp.bfloat16, 4)
    assert w.nbytes == 6 * 32 + 2 * 6 * 4 * 2
    ragged = make(rng, 3, "float32", Case(1, 6, 11, 4)).tensor
    assert (ragged.shape, ragged.k, ragged.group_size) == ((6, 11), 11, 4)


def test_tensor_is_a_pytree(rng):
    w = make(rng, 4, "float32", Case(1, 6, 64, 16, "zero")).tensor
    assert len(jax.tree.leaves(w)) == 3
    assert jax.tree.map(lambda a: a, w).shape == w.shape
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), w)
    assert (specs.shape, specs.dtype, specs.nbytes) == (w.shape, w.dtype, w.nbytes)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    assert paths == [".packed", ".scale", ".zero"]
    with pytest.raises(AttributeError):
        w.bits = 3


def test_stack(rng):
    parts = [make(rng, 3, "float32", Case(1, 4, 40, 8, "offset")) for _ in range(3)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in parts))
    assert w.shape == (3, 4, 40)
    np.testing.assert_array_equal(dequantize(w), jnp.stack([dequantize(p.tensor) for p in parts]))
    np.testing.assert_array_equal(dequantize(w[1]), dequantize(parts[1].tensor))
    np.testing.assert_array_equal(
        unpack_bits(np.asarray(w[2].packed), 3, 40), unpack_bits(parts[2].packed, 3, 40)
    )


def test_stack_with_codebooks():
    packed = pack(np.arange(16).reshape(2, 1, 8) % 4, 2)
    books = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.float32)
    w = QuantizedTensor(packed=packed, scale=np.ones(2, np.float32), codebook=books, bits=2, k=8)
    assert w[1].codebook.shape == (4,)
    np.testing.assert_array_equal(dequantize(w[1])[0], books[1][np.arange(8) % 4])
    np.testing.assert_array_equal(dequantize(w)[1], dequantize(w[1]))
