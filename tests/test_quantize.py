"""quantize by min-max: half a step of error, whatever the group, the dtype and the axis.

The search for the least squared error, and formats with a name, are in test_rounding.py and test_quantize_formats.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemv import dequantize, gemv, unpack
from jaxgemv import quantize as by_any_method

quantize = partial(by_any_method, method="minmax")
GROUPS = (None, 128, 32, 24, 1000)  # 24 does not divide K; 1000 is more than K


def check_error(w, weight, bits):
    """At most half a step, and what rounding the step to its own dtype adds over all the codes."""
    group = weight.shape[-1] if w.scale.ndim < weight.ndim else -(-weight.shape[-1] // w.scale.shape[-1])
    group = w.group_size or group
    step = np.asarray(w.scale, np.float64).reshape(*weight.shape[:-1], -1)
    step = np.repeat(step, group, axis=-1)[..., : weight.shape[-1]]
    rounding = (1 << bits) * (float(jnp.finfo(w.dtype).eps) + 2.0**-22)
    error = np.abs(np.asarray(dequantize(w, jnp.float32), np.float64) - weight)
    assert (error <= step * (0.5 + rounding)).all()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [False, True])
def test_error(bits, symmetric, rng):
    weight = rng.standard_normal((5, 256)).astype(np.float32)
    w = quantize(weight, bits=bits, group_size=64, symmetric=symmetric)
    assert (w.shape, w.bits, w.scale.shape, w.dtype) == ((5, 256), bits, (5, 4), jnp.float32)
    assert (w.zero is None) == symmetric
    assert w.offset is None
    check_error(w, weight, bits)


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group, rng):
    weight = rng.standard_normal((4, 256)).astype(np.float32)
    w = quantize(weight, bits=4, group_size=group)
    assert w.scale.shape == ((4,) if group is None else (4, -(-256 // group)))
    assert w.group_size == (24 if group == 24 else None)
    check_error(w, weight, 4)
    np.testing.assert_array_equal(
        gemv(np.eye(256, dtype=np.float32), w, implementation="xla").T, dequantize(w)
    )


@pytest.mark.parametrize("k", [1, 7, 33])
def test_ragged(k, rng):
    weight = rng.standard_normal((3, k)).astype(np.float32)
    w = quantize(weight, bits=3, group_size=4)
    assert (w.shape, w.k) == ((3, k), k)
    check_error(w, weight, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale_dtype", [None, "float16", "bfloat16", "float32"])
def test_dtypes(dtype, scale_dtype, rng):
    weight = jnp.asarray(rng.standard_normal((4, 64)), dtype)
    w = quantize(weight, bits=4, group_size=32, scale_dtype=scale_dtype)
    assert w.scale.dtype == w.zero.dtype == (scale_dtype or dtype)
    check_error(w, np.asarray(weight, np.float64), 4)


def test_float64_weight(rng):
    """numpy makes them by default; the scale is then float32."""
    weight = rng.standard_normal((4, 64))
    assert quantize(weight, bits=4).dtype == jnp.float32


def test_in_axis(rng):
    """A Flax kernel is (in, out); a stack of them (layers, in, out)."""
    weight = rng.standard_normal((2, 64, 6)).astype(np.float32)
    w = quantize(weight, bits=4, group_size=16, in_axis=1)
    expected = quantize(weight.swapaxes(1, 2), bits=4, group_size=16)
    assert w.shape == (2, 6, 64)
    jax.tree.map(np.testing.assert_array_equal, w, expected)
    one = quantize(weight[0], bits=4, group_size=16, in_axis=0)
    jax.tree.map(np.testing.assert_array_equal, one, expected[0])


@pytest.mark.parametrize("symmetric", [False, True])
def test_zeros_stay_zeros(symmetric, rng):
    """Pruned weights, padded rows, whole groups of nothing: no NaN, no offset."""
    weight = rng.standard_normal((4, 64)).astype(np.float32)
    weight[0] = 0
    weight[1, 16:32] = 0
    weight[2, ::2] = 0
    weight[3] = 1e-30  # less than float16 can say
    w = quantize(weight, bits=4, group_size=16, symmetric=symmetric, scale_dtype="float16")
    restored = np.asarray(dequantize(w))
    assert (restored[weight == 0] == 0).all()
    assert (restored[3] == 0).all()


@pytest.mark.parametrize("value", [-3.0, 0.0, 5.0])
def test_constant_groups(value):
    weight = np.full((2, 32), value, np.float32)
    w = quantize(weight, bits=4, group_size=16)
    check_error(w, weight, 4)


def test_one_bit():
    """Plus and minus the mean magnitude of the group."""
    weight = np.array([[1, -3, 1, 3, 2, 2, -2, 2]], np.float32)
    w = quantize(weight, bits=1, group_size=4)
    np.testing.assert_array_equal(dequantize(w), [[2, -2, 2, 2, 2, 2, -2, 2]])


def test_extremes_are_kept(rng):
    """The ends of a group's range are codes; symmetric uses all codes but keeps 0 in the middle."""
    weight = np.array([[-7, 8, 0, 3]], np.float32)
    w = quantize(weight, bits=4, group_size=4)
    np.testing.assert_array_equal(dequantize(w), weight)
    assert (np.asarray(unpack(w.packed, 4, 4)).min(), np.asarray(unpack(w.packed, 4, 4)).max()) == (0, 15)
    symmetric = quantize(-weight, bits=4, group_size=4, symmetric=True)
    np.testing.assert_array_equal(dequantize(symmetric), -weight)


def test_under_transformations(rng):
    weight = rng.standard_normal((3, 4, 64)).astype(np.float32)
    expected = quantize(weight, bits=4, group_size=16)
    for f in (jax.jit, jax.vmap, lambda f: lambda w: jax.lax.map(f, w)):
        found = f(lambda w: quantize(w, bits=4, group_size=16))(weight)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    shapes = jax.eval_shape(lambda w: quantize(w, bits=4, group_size=16), weight)
    assert (shapes.shape, shapes.scale.shape) == ((3, 4, 64), (3, 4, 4))


def test_placeholders(rng):
    """A ShapeDtypeStruct for a weight gives those of the tensor, so that a checkpoint can be restored into it."""
    spec = jax.eval_shape(lambda w: quantize(w, bits=3), jax.ShapeDtypeStruct((4, 200), jnp.bfloat16))
    w = quantize(jnp.zeros((4, 200), jnp.bfloat16), bits=3)
    assert jax.tree.structure(spec) == jax.tree.structure(w)
    assert [a.shape for a in jax.tree.leaves(spec)] == [a.shape for a in jax.tree.leaves(w)]
