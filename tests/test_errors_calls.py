"""Mistakes of calls outside of a trace: what abstract evaluation, as in test_errors.py, does not come across."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_errors import W, X, a, i32, u32

import jaxgemv
from jaxgemv import QuantizedTensor, gemv, gemv_int4


@pytest.mark.parametrize(
    ("good", "bad"),
    [({"bits": 4}, {"bits": 4.0}), ({"bits": 1}, {"bits": True}), ({"group_size": 16}, {"group_size": 16.0})],
    ids=str,
)
def test_a_call_that_was_compiled_does_not_let_its_like_pass(good, bad):
    """4.0 and True are equal to 4 and 1, by which compiled calls are found."""
    (name, value), *_ = good.items()
    given = {"bits": 4} | good
    w = QuantizedTensor.from_codes(jnp.ones((6, 64), i32), jnp.ones((6, 4)), **given)
    like = dataclasses.replace(w, **bad)
    x = jnp.ones(64)
    for _ in range(2):
        gemv(x, w)
        with pytest.raises(ValueError, match=f"gemv: {name} must be .*; got {bad[name]}"):
            gemv(x, like)
    with pytest.raises(ValueError, match=f"gemv: {name} must be .*; got {bad[name]}"):
        gemv(x, w=like)
    if name == "group_size":
        gemv_int4(x, w.packed, None, w.scale, group_size=value)
        with pytest.raises(ValueError, match=r"gemv_int4: group_size must be .*; got 16\.0"):
            gemv_int4(x, w.packed, None, w.scale, **bad)


def test_round_norm_of_an_int_after_that_of_a_bool():
    x, w = jnp.ones(64), QuantizedTensor.from_codes(jnp.ones((6, 64), i32), jnp.ones(6), bits=4)
    gemv(x, w, norm=x, round_norm=True)
    with pytest.raises(TypeError, match="round_norm must be True or False; got 1"):
        gemv(x, w, norm=x, round_norm=1)


@pytest.mark.parametrize("given", [None, "no array"], ids=str)
def test_no_array(given):
    x, scale, got = jnp.ones((2, 64)), jnp.ones(6), None if given is None else "str"
    w = QuantizedTensor(packed=jnp.zeros((6, 8), u32), scale=scale, bits=4)
    expected = "must be a QuantizedTensor or a float array" if given is None else "must be an array"
    for f, text in (
        (lambda a: gemv(x, a), f"gemv: w {expected}"),
        (lambda a: gemv(a, w), "gemv: x must be an array"),
        (lambda a: gemv_int4(x, a, None, scale), "gemv_int4: Wq must be an array"),
        (lambda a: gemv(x, dataclasses.replace(w, packed=a)), "gemv: w.packed must be an array"),
        (lambda a: jaxgemv.pack(a, 4), "pack: codes must be an array"),
        (lambda a: jaxgemv.unpack(a, 4, 8), "unpack: packed must be an array"),
        (lambda a: jaxgemv.quantize(a), "quantize: weight must be an array"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{text}; got {got}") + r"(\n|$)"):
            f(given)


def test_shapes_outside_of_a_trace():
    """Under jax.eval_shape they are traced; elsewhere there is nothing to multiply."""
    x, w = jnp.ones((2, 64)), QuantizedTensor(packed=jnp.zeros((6, 8), u32), scale=jnp.ones(6), bits=4)
    text = "got a ShapeDtypeStruct, for which there is jax.eval_shape"
    for f, name in (
        (lambda: gemv(X, w), "gemv: x"),
        (lambda: gemv(x, W), "gemv: w.packed"),
        (lambda: gemv(x, a(6, 64)), "gemv: w"),
        (W.dequantize, "dequantize: w.packed"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be an array; {text}"):
            f()
    assert jax.eval_shape(gemv, X, W).shape == (2, 6)


def test_a_transposed_weight():
    w = QuantizedTensor(packed=jnp.zeros((6, 8), u32), scale=2.0, bits=4)
    with pytest.raises(TypeError, match=r"gemv: w must be .*; got its w\.T: give w, or write x @ w\.T"):
        gemv(jnp.ones(64), w.T)
    np.testing.assert_array_equal(jnp.ones(64) @ w.T, gemv(jnp.ones(64), w))
