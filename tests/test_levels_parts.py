"""Parts around the product, scales of one byte and bad indices, in each instruction set of the CPU."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parts import ACTIVATIONS, GATED, activated
from problems import Case, make
from test_kernels import telling
from test_levels import only

from jaxgemv import QuantizedTensor, gemv, gemv_int4
from jaxgemv._ffi import TARGET


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_one_call(isa, activation, rng):
    """That has all parts; and x is not made float32 around it."""
    for m in (1, 2, 5, 20):
        n, k = 2 * 83, 1100
        p = make(rng, 4, "bfloat16", Case(m, n, k, 128, "zero", bias=True))
        residual = np.zeros((m, n // 2 if activation in GATED else n), np.float16)
        norm = np.ones(k, jnp.bfloat16)
        f = partial(gemv, bias=p.bias, norm=norm, activation=activation, residual=residual)
        f = jax.jit(partial(f, out_dtype="float32", implementation="cpu"))
        text = f.trace(p.x, p.tensor).lower().as_text()
        assert text.count(f"@{TARGET}(") == 1
        assert f"tensor<{m}x{k}xf32>" not in text


def test_activations_as_functions(isa):
    """Of numbers that are exact: a few roundings, more only where an exponential is small."""
    y = np.concatenate([np.linspace(-40, 40, 4001), [-1e30, 1e30, np.inf, np.nan]]).astype(np.float32)
    w = QuantizedTensor(packed=np.zeros((len(y), 1), np.uint32), scale=np.ones((), np.float32), bits=4)
    plain = [None, *(a for a in ACTIVATIONS if a not in GATED)]

    @jax.jit
    def f(x, w, y):
        return [gemv(x, w, bias=y, activation=a, implementation="cpu")[0] for a in plain]

    wide = y[:-2].astype(np.float64)
    for activation, got in zip(plain, f(np.zeros((1, 8), np.float32), w, y)):
        with telling(activation), np.errstate(all="ignore"):
            assert np.isnan(got[-1])
            assert got[-2] == np.inf
            values, exact = np.asarray(got[:-2]), accurate(wide, activation)
            exponent = -np.log(np.abs(exact / wide))  # of the share of y that is left
            roundings = np.nan_to_num(1 + np.maximum(exponent, 0), nan=1, posinf=1e3)
            eps, tiny = np.finfo(np.float32).eps, np.finfo(np.float32).tiny
            tolerance = 4 * roundings * eps * np.abs(exact) + 64 * tiny
            np.testing.assert_array_less(np.abs(values - exact) / (tolerance + (exact == wide)), 1)


def accurate(y, activation):
    """As parts.activated, also where nearly nothing of y is left."""
    if activation == "gelu":
        exponent = -2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
        return y / (1 + np.exp(np.minimum(exponent, 700)))
    if activation == "gelu_exact":
        return y / 2 * np.vectorize(math.erfc)(-y / 2**0.5)
    if activation == "silu":
        return y / (1 + np.exp(np.minimum(-y, 700)))
    return activated(y, activation)


def test_residual_in_place(isa, rng):
    """Each element is finished once, also where the last rows are repeated."""
    f = jax.jit(lambda r, x, w: gemv(x, w, residual=r, implementation="cpu"), donate_argnums=0)
    for m in (1, 3):
        p = make(rng, 4, "float32", Case(m, 70, 256, 64), exact=True)
        r = rng.integers(-9, 9, (m, 70)).astype(np.float32)
        np.testing.assert_array_equal(f(jnp.asarray(r), p.x, p.tensor), p.answer() + r)


def test_index_out_of_range(isa, rng):
    """NaN through everything, and neither weights nor norm are read."""
    problems = [make(rng, 4, "float32", Case(4, 16, 128, 32)) for _ in range(2)]
    stack = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    ids, norm = np.array([0, 2, -1, 1], np.int32), np.ones((2, 128), np.float32)
    residual = np.ones((4, 16), np.float32)
    every = [None, *ACTIVATIONS]

    @jax.jit
    def f(x, w, norm, residual):
        part = partial(gemv, x, w, index=ids, norm=norm, implementation="cpu")
        return [part(activation=a, residual=residual[:, : 8 if a in GATED else 16]) for a in every]

    for activation, y in zip(every, f(problems[0].x, stack, norm, residual)):
        with telling(activation):
            np.testing.assert_array_equal(np.isnan(y).any(-1), [False, True, True, False])
            assert np.isnan(y[1:3]).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(), (70,), (70, 16)], ids=["tensor", "row", "groups"])
def test_one_byte_scales(isa, shape, dtype, rng):
    """As the same ones in float32, in products and gradients; NaN for those that are none."""
    codes = rng.integers(120, 135, shape) if dtype.endswith("fnu") else rng.integers(0, 127, shape)
    scale = np.asarray(codes, np.uint8).view(dtype)
    nan = np.full(shape, 255, np.uint8).view(dtype)
    problems = [
        make(rng, 4, "float32", Case(m, 70, 512, 32 if len(shape) == 2 else "row")) for m in (1, 3, 20)
    ]

    @jax.jit
    def f(xs, ws):
        products = [jax.vjp(lambda x, w=w: gemv(x, w, implementation="cpu"), x) for x, w in zip(xs, ws)]
        return [(y, back(jnp.ones_like(y))[0]) for y, back in products]

    def with_scale(scale):
        return [p.x for p in problems], [dataclasses.replace(p.tensor, scale=scale) for p in problems]

    jax.tree.map(
        np.testing.assert_array_equal, f(*with_scale(scale)), f(*with_scale(scale.astype(np.float32)))
    )
    assert f.trace(*with_scale(scale)).lower().as_text().count(f"@{TARGET}(") == 2 * len(problems)
    for y, _ in f(*with_scale(nan)):
        assert np.isnan(y).all()


def test_every_byte(isa):
    """As JAX reads them. (Where x is fixed point, scales below 2^-97 are lost.)"""
    for dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
        scale = np.arange(1, 256, dtype=np.uint8).view(dtype)  # XLA's threads flush e8m0's 2^-127
        packed, zero = np.ones((255, 1), np.uint32), np.zeros((), np.float32)
        for m in (1, 3):
            with only("f32_panel"):
                y = gemv_int4(np.ones((m, 1), np.float32), packed, zero, scale, implementation="cpu")
            np.testing.assert_array_equal(y[-1], scale.astype(np.float32))
