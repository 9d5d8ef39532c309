"""Formats with a name against those who made them: MLX, bitsandbytes as onnxruntime reads it, gguf, ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from problems import unpack_bits
from tolerance import assert_equal

from jaxgemv import codebooks, dequantize, gemv, quantize
from jaxgemv._formats import FORMATS

pytestmark = pytest.mark.numerics

TABLES = {"nf4": codebooks.NF4, "fp4": codebooks.FP4, "iq4_nl": codebooks.IQ4_NL}
TABLES |= {"mxfp4": codebooks.E2M1, "nvfp4": codebooks.E2M1}


def values_of(w):
    """float64 (..., N, K) from the bytes of a tensor, with nothing of jaxgemv's arithmetic."""
    packed, scale = np.asarray(w.packed), np.asarray(w.scale)
    if w.codebook is None:
        values = packed.astype(np.float64)
    else:
        codes = unpack_bits(packed, 4, w.shape[-1])
        tables = np.asarray(w.codebook, np.float64).reshape(-1, 16)
        values = np.stack([t[c] for t, c in zip(tables, codes.reshape(len(tables), -1))]).reshape(codes.shape)
    wide = scale.astype(np.float64)
    if scale.ndim < packed.ndim:
        wide = wide[..., None]
    else:
        wide = np.repeat(wide, w.group_size or w.shape[-1] // scale.shape[-1], axis=-1)[..., : w.shape[-1]]
    if w.global_scale is not None:
        wide = wide * np.asarray(w.global_scale, np.float64)[..., None, None]
    return values * wide


def error(w, weight):
    return np.sqrt(np.mean(np.square(values_of(w) - weight)) / np.mean(np.square(weight)))


def test_codebooks():
    for table in TABLES.values():
        assert (table.shape, table.dtype) == ((16,), np.float32)
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0
    of_ml_dtypes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(codebooks.E2M1, of_ml_dtypes)
    assert np.signbit(codebooks.E2M1[8])
    for table, dtype in (
        (codebooks.E4M3, ml_dtypes.float8_e4m3fn),
        (codebooks.E5M2, ml_dtypes.float8_e5m2),
    ):
        assert (table.shape, table.dtype) == ((256,), np.float32)
        codes = np.arange(256, dtype=np.uint8)
        is_nan = np.isnan(codes.view(dtype).astype(np.float64))
        np.testing.assert_array_equal(np.isnan(table), is_nan)
        np.testing.assert_array_equal(table.astype(dtype).view(np.uint8)[~is_nan], codes[~is_nan])


def test_iq4_nl_is_that_of_gguf():
    gguf = pytest.importorskip("gguf")
    # Its dequantize reads a scale, then nibbles: code j in the low half of byte j, code j + 16 in the high half.
    block = np.concatenate([np.array([1], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 17])
    weights = gguf.quants.dequantize(block[None], gguf.GGMLQuantizationType.IQ4_NL)[0]
    np.testing.assert_array_equal(weights, np.tile(codebooks.IQ4_NL, 2))


@pytest.fixture(scope="module")
def weight():
    return (0.02 * np.random.default_rng(20251).standard_normal((64, 512))).astype(np.float32)


@pytest.mark.parametrize("method", ["minmax", "mse"])
@pytest.mark.parametrize("format", FORMATS)
def test_arrays(format, method, weight):
    """Shapes and dtypes, what they mean, and the products they give."""
    w = quantize(weight, format=format, method=method)
    of = FORMATS[format]
    assert (w.shape, w.bits, w.group_size, w.k, w.zero, w.offset) == (
        (64, 512),
        of.bits,
        None,
        None,
        None,
        None,
    )
    assert w.packed.dtype == (jnp.float8_e4m3fn if of.bits == 8 else jnp.uint32)
    assert w.scale.dtype == (of.scale_dtype or jnp.float32)
    assert w.scale.shape == ((64, 512 // of.group_size) if of.group_size else (64,))
    assert (w.global_scale is not None) == (format == "nvfp4")
    if of.bits == 4:
        np.testing.assert_array_equal(w.codebook, TABLES[format])
    np.testing.assert_allclose(dequantize(w, jnp.float32), values_of(w), rtol=2.0**-22)
    np.testing.assert_array_equal(
        gemv(np.eye(512, dtype=np.float32)[:3], w, implementation="xla"), dequantize(w, jnp.float32)[:, :3].T
    )


@pytest.mark.parametrize("format", TABLES)
def test_codes_are_the_nearest(format, weight):
    w = quantize(weight, format=format, method="minmax")
    table = TABLES[format].astype(np.float64)
    scale = np.asarray(w.scale).astype(np.float64) * (1 if w.global_scale is None else float(w.global_scale))
    scale = np.repeat(scale, FORMATS[format].group_size, axis=1)
    distances = np.abs(table - (weight / scale)[..., None])
    chosen = np.abs(values_of(w) - weight) / scale
    np.testing.assert_allclose(chosen, distances.min(axis=-1), atol=2.0**-18 * np.abs(table).max())


MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@pytest.mark.parametrize("format", MODES)
@pytest.mark.parametrize("magnitude", [1, 0.02, 1e-30, 1e30])
def test_minmax_is_mlx(format, magnitude, rng):
    """Its bytes: codes and scales. Its global_scale is the largest magnitude, of which ours is a 448 * 6th."""
    mx = pytest.importorskip("mlx.core")
    weight = (rng.standard_normal((64, 512)) * magnitude).astype(np.float32)
    weight[0], weight[1, :32], weight[2, ::3], weight[3] = 0, 0, 0, weight[3, 0]
    group, bits = MODES[format]
    more = {"global_scale": mx.array(np.abs(weight).max())} if format == "nvfp4" else {}
    arrays = mx.quantize(mx.array(weight), group_size=group, bits=bits, mode=format, **more)
    packed, scale = map(np.array, arrays)
    w = quantize(weight, format=format, method="minmax")
    np.testing.assert_array_equal(np.asarray(w.packed).view(np.uint8), packed.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(w.scale).view(np.uint8), scale)
    theirs = np.array(
        mx.dequantize(*arrays, group_size=group, bits=bits, mode=format, dtype=mx.float32, **more)
    )
    np.testing.assert_allclose(dequantize(w), theirs, rtol=2.0**-22)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_mlx_reads_the_search(format, weight):
    mx = pytest.importorskip("mlx.core")
    w = quantize(weight, format=format)
    arrays = (mx.array(np.asarray(a).view(kind)) for a, kind in ((w.packed, np.uint32), (w.scale, np.uint8)))
    more = {} if w.global_scale is None else {"global_scale": mx.array(np.float32(w.global_scale * 2688))}
    group, bits = MODES[format]
    theirs = mx.dequantize(*arrays, group_size=group, bits=bits, mode=format, dtype=mx.float32, **more)
    np.testing.assert_allclose(dequantize(w), np.array(theirs), rtol=2.0**-22)


@pytest.mark.parametrize(("format", "kind"), [("fp4", 0), ("nf4", 1)])
def test_bitsandbytes_of_onnxruntime(format, kind, weight):
    """MatMulBnb4 of the identity gives the weight. Its bytes have code 0 in the high nibble."""
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    n, k = weight.shape
    w = quantize(weight, format=format)
    codes = unpack_bits(np.asarray(w.packed), 4, k).astype(np.uint8)
    raw = (codes[:, ::2] << 4 | codes[:, 1::2]).ravel()
    make = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        "MatMulBnb4",
        ["x", "codes", "absmax"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        block_size=64,
        quant_type=kind,
    )
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [make("x", onnx.TensorProto.FLOAT, [k, k])],
        [make("y", onnx.TensorProto.FLOAT, [k, n])],
        [
            onnx.numpy_helper.from_array(a, name)
            for a, name in ((raw, "codes"), (np.ravel(w.scale), "absmax"))
        ],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.eye(k, dtype=np.float32)})
    np.testing.assert_allclose(dequantize(w), y.T, rtol=2.0**-22)


@pytest.mark.parametrize(("format", "k"), [("nf4", 83), ("nvfp4", 83), ("fp8", 83), ("mxfp4", 5)])
def test_ragged_and_short(format, k, rng):
    """K that neither groups nor words divide, and K of less than a group."""
    weight = rng.standard_normal((3, k)).astype(np.float32)
    w = quantize(weight, format=format)
    assert w.shape == (3, k)
    assert w.k == (k if w.packed.dtype == jnp.uint32 else None)
    np.testing.assert_allclose(dequantize(w, jnp.float32), values_of(w), rtol=2.0**-22)
    assert error(w, weight) < 0.13


def test_fp8_in_groups(weight):
    w = quantize(weight, format="fp8", group_size=128)
    assert (w.scale.shape, w.group_size) == ((64, 4), None)
    assert error(w, weight) < 0.027
    ragged = quantize(weight, format="fp8", group_size=100)
    assert (ragged.scale.shape, ragged.group_size) == ((64, 6), 100)
    assert error(ragged, weight) < 0.027


def test_stacks(rng):
    """Every array of a stack leads with it, and an entry is what that matrix alone gives; vmap too."""
    weight = (rng.standard_normal((3, 64, 8)) * [[[1]], [[0.1]], [[5]]]).astype(np.float32)
    w = quantize(weight, format="nvfp4", in_axis=1)
    assert w.shape == (3, 8, 64)
    assert all(a.shape[0] == 3 for a in jax.tree.leaves(w))
    assert (w.global_scale.shape, w.codebook.shape) == ((3,), (3, 16))
    for i in range(3):
        assert_equal(w[i], quantize(weight[i].T, format="nvfp4"))
    assert_equal(jax.vmap(lambda a: quantize(a, format="nvfp4", in_axis=0))(weight), w)


@pytest.mark.parametrize("format", FORMATS)
def test_placeholders(format, weight):
    def kinds(w):
        return [(a.shape, a.dtype) for a in jax.tree.leaves(w)]

    spec = jax.eval_shape(lambda w: quantize(w, format=format), jax.ShapeDtypeStruct((64, 512), jnp.float32))
    w = quantize(weight, format=format)
    assert jax.tree.structure(spec) == jax.tree.structure(w)
    assert kinds(spec) == kinds(w)
    spec = jax.eval_shape(lambda w: quantize(w, format=format), jax.ShapeDtypeStruct((4, 200), jnp.bfloat16))
    assert spec.dtype == (jnp.float32 if FORMATS[format].scale_dtype else jnp.bfloat16)


@pytest.mark.parametrize(("format", "scale_dtype"), [("nf4", "float16"), ("fp8", "bfloat16")])
def test_scale_dtype(format, scale_dtype, weight):
    w = quantize(weight, format=format, scale_dtype=scale_dtype)
    assert w.scale.dtype == scale_dtype
    np.testing.assert_allclose(error(w, weight), error(quantize(weight, format=format), weight), rtol=0.02)


def test_what_agrees_is_taken(weight):
    expected = quantize(weight, format="mxfp4")
    assert_equal(
        quantize(weight, format="mxfp4", bits=4, group_size=32, scale_dtype="float8_e8m0fnu"), expected
    )
    assert_equal(quantize(weight, format="fp8", bits=8, group_size=None), quantize(weight, format="fp8"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_not_finite(format, method, weight):
    """A group with NaN or infinity is NaN, and the others are not."""
    bad = weight.copy()
    bad[3, 70], bad[5, 200] = np.nan, -np.inf
    w = quantize(bad, format=format, method=method)
    found = np.isnan(dequantize(w))
    group = FORMATS[format].group_size or 512
    expected = np.zeros((64, 512 // group), bool)
    expected[3, 70 // group] = expected[5, 200 // group] = True
    np.testing.assert_array_equal(found, np.repeat(expected, group, axis=1))


@pytest.mark.parametrize("format", FORMATS)
def test_under_strict_promotion(format):
    with jax.numpy_dtype_promotion("strict"):
        assert quantize(jnp.ones((4, 64)), format=format).shape == (4, 64)


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_under_strict_promotion_of_64_bits(format, x64):
    with x64, jax.numpy_dtype_promotion("strict"):
        assert quantize(np.ones((4, 64), np.float32), format=format).shape == (4, 64)
