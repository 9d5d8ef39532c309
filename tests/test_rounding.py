"""method="mse": what it promises of each group, on normal and on real weights."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerance import assert_equal

from jaxgemv import _quantize, dequantize, quantize
from jaxgemv._formats import FORMATS

pytestmark = pytest.mark.numerics

# Relative error (root mean square) on normal weights that users may rely on.
BARS = (
    ({"bits": 4}, 0.0925),
    ({"bits": 3, "group_size": 64}, 0.168),
    ({"format": "nf4"}, 0.088),
    ({"format": "nvfp4"}, 0.086),
)
KINDS = (
    {"bits": 3, "group_size": 40},  # ragged
    {"bits": 8, "group_size": None},
    {"bits": 2, "group_size": 16, "symmetric": True},
    {"bits": 4, "group_size": 32, "scale_dtype": "bfloat16"},
    *({"format": format} for format in FORMATS),
)


def name_of(kind):
    return "-".join(map(str, kind.values()))


def squares(w, weight, importance=1):
    """Of each group the sum of the squared errors, in float64; (N, G)."""
    error = np.square(np.asarray(dequantize(w, jnp.float32), np.float64) - weight) * importance
    group = w.group_size or weight.shape[1] // max(w.scale.size // len(weight), 1)
    return np.add.reduceat(error, range(0, weight.shape[1], group), axis=1)


@pytest.fixture(scope="module")
def weight():
    return (0.02 * np.random.default_rng(20251).standard_normal((64, 512))).astype(np.float32)


@pytest.fixture(scope="module")
def real(minilm):
    return minilm["encoder.layer.3.output.dense.weight"][:64, :512]


@pytest.mark.parametrize(
    "kind", [*KINDS, {"bits": 1}, {"bits": 2}, {"bits": 3, "symmetric": True}], ids=name_of
)
@pytest.mark.parametrize("method", ["mse", "minmax"])
def test_the_size_of_weights_does_not_matter(kind, method, weight):
    """Times a power of two the codes are the same, even where float32 has no squares of the weights. Near its largest
    fewer scales can be tried, or none: then no number comes back, not zeros."""
    weight = weight / np.abs(weight).max()
    weight *= np.random.default_rng(1).random(weight.shape) < 0.3
    expected = np.asarray(dequantize(quantize(weight, method=method, **kind), jnp.float32))
    error = np.square(expected - weight).sum(axis=1)
    for exponent in (-60, -30, 60, 123, 126, 127):
        w = quantize(weight * np.float32(2.0**exponent), method=method, **kind)
        values = np.asarray(dequantize(w, jnp.float32)) * 2.0**-exponent
        if exponent < 120:
            assert_equal(values, expected)
        else:
            known = np.isfinite(values)
            assert (
                np.square(values - weight, where=known, out=np.zeros(known.shape)).sum(axis=1) < 2 * error
            ).all()


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_size_of_importance_does_not_matter(kind, weight):
    importance = np.random.default_rng(2).uniform(0.1, 1, weight.shape[1]).astype(np.float32)
    w = quantize(weight, importance=importance, **kind)
    for exponent in (-100, 100):
        assert_equal(quantize(weight, importance=importance * np.float32(2.0**exponent), **kind), w)


@pytest.mark.parametrize(("kind", "bar"), BARS, ids=str)
def test_error_on_normal_weights(kind, bar, weight):
    error = squares(quantize(weight, **kind), weight).sum() / np.square(weight).sum()
    assert np.sqrt(error) < bar


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("weights", ["weight", "real"])
def test_no_group_is_worse_than_by_minmax(kind, weights, request):
    weight = request.getfixturevalue(weights)
    found, least = (squares(quantize(weight, method=m, **kind), weight) for m in ("mse", "minmax"))
    # Both are sums of float32 products.
    assert (found <= least * (1 + 2.0**-16)).all()
    if kind.get("format") != "mxfp8" and kind.get("bits") != 8:
        assert found.sum() < 0.98 * least.sum()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], {"format": "nvfp4"}, {"format": "fp8"}], ids=name_of)
def test_same_bytes_for_either_axis(kind, weight):
    expected = quantize(weight, **kind)
    assert_equal(quantize(weight, **kind), expected)
    assert_equal(quantize(np.ascontiguousarray(weight.T), in_axis=0, **kind), expected)


@pytest.mark.parametrize("kind", [{"format": "iq4_nl"}], ids=["iq4_nl"])
def test_same_bytes_under_jit(kind, weight):
    found = jax.jit(lambda a: quantize(a.T, **kind))(np.ascontiguousarray(weight.T))
    assert_equal(found, quantize(weight, **kind))


@pytest.mark.parametrize("kind", [{"bits": 4, "group_size": 48}, {"format": "nvfp4"}], ids=name_of)
def test_some_rows_at_a_time(kind, rng):
    """Two blocks that are not alike give what one gives."""
    stack = rng.standard_normal((2, 131, 1024)).astype(np.float32)
    assert stack.size > _quantize._BLOCK > stack[0].size
    w = quantize(stack, **kind)
    for i in range(2):
        assert_equal(w[i], quantize(stack[i], **kind))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("axes", "spec"), [("Explicit", P("x", None)), ("Auto", P(None, "x"))], ids=["N", "K"]
)
def test_shards_stay_where_they_are(axes, spec, rng):
    """Also where some rows are taken at a time: of each shard some."""
    weight = rng.standard_normal((768, 1024)).astype(np.float32)
    assert weight.size > _quantize._BLOCK
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType[axes],), devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        compiled = jax.jit(quantize).lower(put := jax.device_put(weight, NamedSharding(mesh, spec))).compile()
        w = compiled(put)
    assert w.packed.sharding.spec == spec
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    assert_equal(jax.tree.map(np.asarray, w), jax.tree.map(np.asarray, quantize(weight)))


@pytest.mark.parametrize(
    ("kind", "dtype", "in_axis"),
    [({"bits": 4}, "float32", 0), ({"format": "nvfp4"}, "bfloat16", 0)],
    ids=str,
)
def test_memory(kind, dtype, in_axis):
    """At most two float32 copies of the weight besides argument and result."""
    shape = (1024, 2048)
    spec = jax.ShapeDtypeStruct(shape if in_axis else shape[::-1], dtype)
    compiled = jax.jit(partial(quantize, in_axis=in_axis, **kind)).lower(spec).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * 4 * shape[0] * shape[1]


def test_zero_is_a_fraction(weight):
    """In scale's dtype; symmetric has none."""
    w = quantize(weight, bits=4, group_size=32, scale_dtype="bfloat16")
    assert w.scale.dtype == w.zero.dtype == jnp.bfloat16
    assert (np.asarray(w.zero).astype(np.float32) % 1 != 0).mean() > 0.9
    assert quantize(weight, bits=2, group_size=16, symmetric=True).zero is None


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_zeros_stay_zeros(kind, weight):
    """Groups of zeros are exact, and so is a matrix of them; padding never counts."""
    pruned = weight.copy()
    pruned[:, 120:320] = 0
    pruned[5] = 0
    restored = np.asarray(dequantize(quantize(pruned, **kind), jnp.float32))
    assert not restored[5].any()
    if kind.get("group_size", 0) is not None and kind.get("format") != "fp8":
        assert not restored[:, 160:300].any()
    assert not np.asarray(dequantize(quantize(np.zeros_like(weight), **kind), jnp.float32)).any()


def test_a_short_group_is_as_if_alone(weight):
    """Not to the bit, as the sums are other ones; but neither is better."""
    whole, alone = weight[:, :148], weight[:, 128:148]
    one = squares(quantize(whole, bits=4), whole)[:, -1]
    other = squares(quantize(alone, bits=4), alone)[:, 0]
    np.testing.assert_allclose(one, other, rtol=1e-3)


def test_a_group_far_from_zero(weight):
    """No codes are spent on the way there, which min-max has to do."""
    found, least = (
        squares(quantize(weight + 1, method=m, **KINDS[0]), weight + 1) for m in ("mse", "minmax")
    )
    assert found.sum() < least.sum() / 10


@pytest.mark.parametrize(
    "kind",
    [
        KINDS[0],
        KINDS[2],
        {"format": "nf4"},
        {"bits": 1},
    ],
    ids=name_of,
)
def test_importance(kind, weight):
    """The weighted error is less than without, of each group no more than by min-max; a constant does little."""
    importance = np.random.default_rng(0).exponential(size=512).astype(np.float32) ** 2
    weighted = squares(quantize(weight, importance=importance, **kind), weight, importance)
    assert weighted.sum() < squares(quantize(weight, **kind), weight, importance).sum()
    if kind.get("bits") != 1:
        least = squares(quantize(weight, method="minmax", **kind), weight, importance)
        assert (weighted <= least * (1 + 2.0**-16)).all()
    constant = quantize(weight, importance=np.full(512, 4.0, np.float32), **kind)
    np.testing.assert_allclose(
        squares(constant, weight).sum(), squares(quantize(weight, **kind), weight).sum(), rtol=1e-3
    )
    none = dequantize(quantize(weight, importance=np.zeros(512), **kind))
    assert np.isfinite(none).all()


def test_importance_under_jit(weight):
    importance = np.linspace(0, 2, 512, dtype=np.float32)
    expected = quantize(weight, importance=importance, **KINDS[0])
    assert_equal(jax.jit(lambda w, i: quantize(w, importance=i, **KINDS[0]))(weight, importance), expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=name_of)
@pytest.mark.parametrize("method", ["minmax", "mse"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad, method, kind, weight):
    """The group is NaN, and the others are not."""
    weight = weight.copy()
    weight[3, 200] = bad
    group = np.arange(512) // kind["group_size"]
    expected = (np.arange(64) == 3)[:, None] & (group == group[200])
    np.testing.assert_array_equal(np.isnan(dequantize(quantize(weight, method=method, **kind))), expected)


def test_a_short_group_with_x64(rng, x64):
    """What fills it up is float32, and so is all else."""
    weight = rng.standard_normal((8, 70)).astype(np.float32)
    plain = quantize(weight, bits=4, group_size=32)
    with x64:
        wide = quantize(weight, bits=4, group_size=32)
    jax.tree.map(np.testing.assert_array_equal, plain, wide)
