"""Integer activations: exact without scales, and with scales of the weight and of x."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from problems import Case, make
from sharded import mesh_of, put, put_weight
from tolerance import assert_close

import jaxgemv
from jaxgemv import QuantizedTensor, gemv, quantize_activations

K = 256


def int8_problem(rng, rows: int, case: Case, bits: int = 4):
    """(a problem of float32 x that holds bytes, the same x in int8)"""
    p = make(rng, bits, "float32", case._replace(m=rows))
    x = rng.integers(-128, 128, p.x.shape)
    return dataclasses.replace(p, x=x.astype(np.float32)), jnp.asarray(x, jnp.int8)


def scaled(p, scale):
    """The problem whose x is multiplied with one scale a row, or one a group, of x."""
    wide = np.repeat(np.asarray(scale), p.k // scale.shape[-1], axis=-1)
    return dataclasses.replace(p, x=np.asarray(p.x, np.float64) * wide)


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 70])
@pytest.mark.parametrize("groups", [0, 1, 4, 8])
def test_scales_of_x(groups, rows, backend, rng):
    """0: a scalar."""
    p, x = int8_problem(rng, rows, Case(rows, 40, K, 64, "zero", bias=True, scale="float32"))
    scale = rng.uniform(0.01, 0.1, (rows, groups or 1)).astype(np.float32)
    if not groups:
        scale[:] = scale[0]
    y = gemv(x, p.tensor, bias=p.bias, x_scale=scale if groups else scale[0, 0], implementation=backend)
    assert y.dtype == jnp.float32
    p = scaled(p, scale)
    rounded = p.magnitude() * 2**-10 if rows > 64 else 0.0  # to TF32
    assert_close(y, p.answer(), p.magnitude(), K, dtype=jnp.float32, more=rounded)


@pytest.mark.parametrize("form", ["mid", "zero", "fraction", "offset"])
@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("group", ["row", "tensor"])
def test_many_rows_and_row_scales(group, bits, form, rng):
    """By plain XLA: a product of bytes, which rounds nothing."""
    p, x = int8_problem(rng, 70, Case(70, 40, 999, group, form, bias=True, scale="float32"), bits)
    y = gemv(x, p.tensor, bias=p.bias, implementation="xla")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32)


def test_scale_of_the_weight_alone(backend, rng):
    p, x = int8_problem(rng, 3, Case(3, 40, K, 64, "zero", scale="float32"))
    y = gemv(x, p.tensor, implementation=backend)
    assert_close(y, p.answer(), p.magnitude(), K, dtype=jnp.float32)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_exact_integers(rows, bits, rng):
    codes, zero = rng.integers(0, 1 << bits, (24, 999)), rng.integers(0, 1 << bits, (24, 9))
    x = rng.integers(-128, 128, (rows, 999))
    for zeros, group in ((None, None), (zero.astype(np.uint8), 111)):
        w = QuantizedTensor.from_codes(codes, None, zero=zeros, bits=bits, group_size=group)
        y = gemv(x.astype(np.int8), w)
        shift = 1 << bits - 1 if zeros is None else np.repeat(zero, 111, axis=1)
        assert y.dtype == jnp.int32
        np.testing.assert_array_equal(y, x @ (codes - shift).T)


def test_activation_residual_and_global_scale(backend, rng):
    p, x = int8_problem(rng, 3, Case(3, 40, K, 64, "zero", scale="float32", bias=True))
    w = jaxgemv.QuantizedTensor(packed=p.tensor.packed, scale=p.tensor.scale, zero=p.tensor.zero,
                                global_scale=jnp.float32(0.5), bits=4)  # fmt: skip
    scale, residual = np.full((3, 4), 0.01, np.float32), rng.standard_normal((3, 40)).astype(np.float32)
    y = gemv(x, w, x_scale=scale, bias=p.bias, activation="relu", residual=residual, implementation=backend)
    expected = dataclasses.replace(p, bias=None).answer() * 0.005 + np.asarray(p.bias)
    np.testing.assert_allclose(y, np.maximum(expected, 0) + residual, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_transformations(groups, on_cpu, rng):
    """vmap over x, over the weight and over both; grad in scales; scan; a stack with an index."""
    p, x = int8_problem(rng, 6, Case(6, 16, K, 64, "zero", scale="float32"))
    scale = jnp.asarray(rng.uniform(0.01, 0.1, (6, groups)), jnp.float32)
    expected = gemv(x, p.tensor, x_scale=scale)
    for axis in (0, 1):
        mapped = jax.vmap(lambda x, s: gemv(x, p.tensor, x_scale=s), axis)
        y = mapped(jnp.stack([x, x], axis), jnp.stack([scale, scale], axis))
        np.testing.assert_allclose(y[1], expected, rtol=1e-5, atol=2e-3)
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), p.tensor)
    y = jax.vmap(lambda w: gemv(x, w, x_scale=scale))(stack)
    np.testing.assert_allclose(y[1], expected, rtol=1e-5, atol=2e-3)
    y = gemv(x, stack, index=jnp.array([0, 1, 1, 0, 1, 0]), x_scale=scale)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-3)
    y = jax.lax.scan(lambda c, w: (c, gemv(x, w, x_scale=scale)), 0, stack)[1]
    np.testing.assert_allclose(y[1], expected, rtol=1e-5, atol=2e-3)

    def total(scale, x_scale):
        w = QuantizedTensor(packed=p.tensor.packed, scale=scale, zero=p.tensor.zero, bits=4)
        return gemv(x, w, x_scale=x_scale).sum()

    grads = jax.grad(total, (0, 1))(p.tensor.scale, scale)
    # Linear in each of them.
    np.testing.assert_allclose((grads[0] * p.tensor.scale).sum(), expected.sum(), rtol=1e-4)
    np.testing.assert_allclose((grads[1] * scale).sum(), expected.sum(), rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("groups", [1, 4])
def test_sharded(groups, kind, on_cpu, rng):
    p, x = int8_problem(rng, 4, Case(4, 24, 512, 64, "zero", scale="float32"))
    scale = rng.uniform(0.01, 0.1, (4, groups)).astype(np.float32)
    expected = gemv(x, p.tensor, x_scale=scale)
    mesh = mesh_of(kind)
    for x_spec, w_spec in itertools.product(
        [(None, None), ("data", None), (None, "model")], [("model", None), (None, "model")]
    ):
        args = put(x, mesh, *x_spec), put_weight(p.tensor, mesh, *w_spec), put(scale, mesh, x_spec[0], None)
        with jax.set_mesh(mesh):
            y = jax.jit(lambda x, w, scale: gemv(x, w, x_scale=scale))(*args)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantize_activations(dtype, group_size, rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 96)) * 10, dtype).at[1, 2].set(0).at[0, 0, 5].set(jnp.nan)
    codes, scale = quantize_activations(x, group_size=group_size)
    groups = 96 // (group_size or 96)
    assert (codes.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    assert (codes.shape, scale.shape) == (x.shape, (2, 3, groups))
    assert not np.any(scale[1, 2])
    assert not np.any(codes[1, 2])
    assert np.isnan(scale[0, 0, 0])
    per_group = np.asarray(x, np.float64).reshape(2, 3, groups, -1)
    back = np.asarray(codes, np.float64).reshape(per_group.shape) * np.asarray(scale, np.float64)[..., None]
    fine = np.isfinite(scale)
    assert np.all(np.abs(back - per_group)[fine].max(-1) <= np.asarray(scale)[fine] * 0.5001)
    largest = np.abs(np.asarray(codes, int).reshape(per_group.shape)).max(-1)[fine & (scale != 0)]
    assert np.all(largest == 127)


def test_small_magnitudes_are_no_zeros():
    x = jnp.full((1, 8), 1e-35, jnp.float32)
    codes, scale = quantize_activations(x)
    np.testing.assert_allclose(codes * np.asarray(scale), x, rtol=1e-2)


def test_activations_without_rows():
    x, x_scale = quantize_activations(jnp.ones((0, 64)), group_size=32)
    assert (x.shape, x_scale.shape) == ((0, 64), (0, 2))
