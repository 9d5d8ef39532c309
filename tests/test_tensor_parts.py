"""QuantizedTensor: one-byte scales, global scales, permutations."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

from jaxgemv import QuantizedTensor, dequantize, gemv, pack

CASE = Case(3, 6, 48, 16, "zero")
E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


@pytest.mark.parametrize("dtype", [E4M3, E8M0], ids=lambda d: jnp.dtype(d).name)
def test_one_byte_scale(dtype, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w = dataclasses.replace(p.tensor, scale=p.scale.astype(dtype))  # powers of two
    p = dataclasses.replace(p, scale=np.abs(p.scale))
    w = dataclasses.replace(w, scale=p.scale.astype(dtype))
    assert w.dtype == np.float32
    assert w.dequantize().dtype == np.float32
    np.testing.assert_array_equal(w.dequantize(), p.weight())
    np.testing.assert_array_equal(gemv(p.x, w), p.answer())
    np.testing.assert_array_equal(jax.jit(gemv)(p.x.astype(jnp.bfloat16), w), p.answer().astype(jnp.bfloat16))


def test_special_values_of_one_byte_scales():
    """Byte 255 of e8m0 is NaN, and so is 0x7f of e4m3. (Byte 0, 2^-127, XLA's CPU programs flush to zero.)"""
    w = QuantizedTensor(packed=pack(np.full((3, 64), 9), 4), scale=np.uint8([1, 127, 255]).view(E8M0), bits=4)
    x = np.full((1, 64), 2.0**100, np.float32)
    np.testing.assert_array_equal(gemv(x, w)[0], np.float32([64 * 2.0**-26, 64 * 2.0**100, np.nan]))
    w = dataclasses.replace(w, scale=np.uint8([1, 0x38, 0x7F]).view(E4M3))
    np.testing.assert_array_equal(gemv(np.ones((1, 64), np.float32), w)[0], [64 * 2.0**-9, 64, np.nan])


@pytest.mark.parametrize("dtype", [E4M3, E8M0], ids=lambda d: jnp.dtype(d).name)
def test_gradient_with_a_one_byte_scale(dtype, rng):
    """It has no room for one: x, global_scale and the rest have theirs."""
    p = make(rng, 4, "float32", CASE, exact=True)
    w = dataclasses.replace(
        p.tensor, scale=np.abs(p.scale).astype(dtype), global_scale=np.float32(2), zero=None
    )
    w = jax.tree.map(jnp.asarray, w)

    def loss(x, w):
        return gemv(x, w).sum()

    dx, dw = jax.grad(loss, (0, 1), allow_int=True)(jnp.asarray(p.x), w)
    weight = np.asarray(dataclasses.replace(w, global_scale=None).dequantize(), np.float64)
    np.testing.assert_array_equal(dx, np.broadcast_to(2 * weight.sum(0), p.x.shape))
    np.testing.assert_array_equal(dw.global_scale, (p.x @ weight.T).sum())
    assert dw.scale.dtype == dtype
    if dtype == E4M3:  # e8m0 has no zero
        np.testing.assert_array_equal(dw.scale.astype(np.float32), 0)
    _, t = jax.jvp(lambda x: loss(x, w), (jnp.asarray(p.x),), (jnp.ones_like(p.x),))
    np.testing.assert_array_equal(t, 2 * 3 * weight.sum())


@pytest.mark.parametrize("shape", [(), (6,)])
def test_global_scale(shape, backend, rng):
    p = make(rng, 4, "float32", CASE._replace(bias=True), exact=True)
    scale = np.float32(2.0) ** rng.integers(-2, 3, shape).astype(np.float32)
    w = dataclasses.replace(p.tensor, global_scale=scale)
    expected = p.x @ (p.weight() * np.reshape(scale, (-1, 1))).T + p.bias
    np.testing.assert_array_equal(gemv(p.x, w, bias=p.bias, implementation=backend), expected)


def test_stack_of_global_scales_and_permutations(backend, rng):
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(3)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    perm = np.stack([rng.permutation(48) for _ in range(3)]).astype(np.int32)
    x, ids = problems[0].x, np.array([2, 0, 3], np.int32)
    for scale in (np.float32([1, 2, 4]), rng.integers(1, 4, (3, 6)).astype(np.float32)):
        stack = dataclasses.replace(w, global_scale=scale, perm=perm)
        y = gemv(x, stack, index=ids, implementation=backend)
        for row in range(2):
            i = ids[row]
            weight = problems[i].weight() * np.reshape(scale[i], (-1, 1))
            np.testing.assert_array_equal(y[row], x[row][perm[i]] @ weight.T)
        assert np.isnan(y[2]).all()


def test_perm(backend, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    perm = rng.permutation(48).astype(np.int32)
    w = dataclasses.replace(p.tensor, perm=perm)
    expected = p.x[:, perm] @ p.weight().T
    np.testing.assert_array_equal(gemv(p.x, w, implementation=backend), expected)
    np.testing.assert_array_equal(p.x @ np.asarray(dequantize(w)).T, expected)
    grad = jax.grad(lambda x: gemv(x, w, implementation=backend).sum())(jnp.asarray(p.x))
    np.testing.assert_array_equal(grad, np.broadcast_to(np.asarray(dequantize(w)).sum(0), grad.shape))


@pytest.mark.parametrize("entry", [48, -49, 2**31 - 1, 2**32 + 1])
def test_an_entry_of_perm_out_of_range_shows(entry, backend, rng):
    """As NaN, or as the least integer where there is no NaN; in a stack only where that entry is met."""
    perm = np.arange(48)
    perm[5] = entry
    p = make(rng, 4, "float32", CASE, exact=True)
    w = dataclasses.replace(p.tensor, perm=perm)
    x = rng.integers(-9, 10, p.x.shape).astype(np.int8)
    run = partial(gemv, implementation=backend)
    assert np.isnan(dequantize(w)).all()
    exact = dataclasses.replace(w, scale=None, zero=None)  # of int8 codes alone on a GPU
    y = gemv(x, exact, implementation=None if backend == "cuda" else backend)
    assert (y == np.iinfo(np.int32).min).all()
    # jit itself cuts off what int32 does not hold.
    for of in (run, jax.jit(run, static_argnames="activation"))[: 1 if entry > 2**31 else 2]:
        assert np.isnan(of(p.x, w)).all()
        assert np.isnan(of(x, w)).all()
        assert np.isnan(of(x, w, bias=np.ones(6, np.float32), activation="relu")).all()
        assert np.isnan(of(x, w, x_scale=np.ones((*x.shape[:-1], 3), np.float32))).all()
        stack = jax.tree.map(lambda *a: np.stack(a), w, dataclasses.replace(w, perm=np.arange(48)))
        for rows in (p.x, x):
            assert np.isnan(of(rows, stack, index=np.array([0, 1, 0], np.int32))).all(axis=-1).tolist() == [
                1,
                0,
                1,
            ]


def test_perm_counts_from_the_end_too(backend, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    perm = rng.permutation(48).astype(np.int32)
    x = rng.integers(-9, 10, p.x.shape).astype(np.int8)
    w, same = (dataclasses.replace(p.tensor, perm=each) for each in (perm - 48, perm))
    np.testing.assert_array_equal(dequantize(w), dequantize(same))
    for rows in (p.x, x):
        y, expected = (gemv(rows, each, implementation=backend) for each in (w, same))
        np.testing.assert_array_equal(y, expected)


def test_a_stack_leads_every_leaf(rng):
    """One codebook for all would break scan and vmap, which take an entry of every leaf."""
    packed, scale = np.zeros((3, 6, 6), np.uint32), np.ones(3, np.float32)
    x = np.ones(48, np.float32)
    for field, shape, expected in (("codebook", (16,), "(3, 16)"), ("perm", (48,), "(3, 48)")):
        array = np.zeros(shape, np.int32 if field == "perm" else np.float32)
        w = QuantizedTensor(packed=packed, scale=scale, **{field: array}, bits=4)
        text = re.escape(f"{field} must have shape {expected}, one for each entry of the stack; got {shape}")
        with pytest.raises(ValueError, match=text):
            gemv(x, w, index=0)
        with pytest.raises(ValueError, match=text):
            w.dequantize()
    book = np.arange(16, dtype=np.float32)
    w = QuantizedTensor(packed=packed, scale=scale, codebook=np.stack([book, book + 1, book + 2]), bits=4)
    expected = [[48 * i] * 6 for i in range(3)]
    np.testing.assert_array_equal(jax.lax.scan(lambda c, w: (c, gemv(x, w)), 0, w)[1], expected)
    np.testing.assert_array_equal(jax.vmap(lambda w: gemv(x, w))(w), expected)
