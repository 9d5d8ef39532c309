"""Derivatives against those of a plain jax.numpy expression, on values whose sums are exact."""

import dataclasses
from functools import reduce
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import compiled, on
from problems import Case, make

from jaxgemv import QuantizedTensor, _reference, gemv, quantize, unpack

CASE = Case(3, 10, 48, 16, "zero", bias=True)


def plain(x, codes, scale, zero=None, offset=None, codebook=None, bias=0):
    """The product as one would write it for float codes."""

    def wide(a):
        return jnp.repeat(a, codes.shape[-1] // a.shape[-1], -1)

    if codebook is not None:
        weight = codebook[codes.astype(jnp.int32)] * wide(scale)
    elif offset is not None:
        weight = codes * wide(scale) + wide(offset)
    else:
        weight = (codes - (8 if zero is None else wide(zero))) * wide(scale)
    return jnp.dot(x, weight.T, precision="highest") + bias


BOTH = [(backend, form) for backend in ("cpu", "cuda") for form in ("zero", "offset")]
BOTH += [("xla", "codebook")]


def params_of(rows) -> list:
    return [pytest.param(row, id="-".join(row), marks=[pytest.mark.cuda] * ("cuda" in row)) for row in rows]


@pytest.fixture(params=params_of(BOTH))
def both(request, rng):
    """The same function of (x, floats) twice, ours and the plain one, and a point."""
    with on(request.param[0]):
        yield _both(*request.param, rng)


def _both(backend, form, rng):
    p = make(rng, 4, "float32", CASE._replace(form=form), exact=True)
    codes = np.asarray(unpack(p.packed, 4, 48), np.float32)
    floats = {"scale": p.scale, "zero": p.zero, "offset": p.offset}
    floats = {name: jnp.asarray(a) for name, a in floats.items() if a is not None} | {
        "bias": jnp.asarray(p.bias)
    }
    if form == "codebook":
        floats["codebook"] = jnp.arange(16, dtype=jnp.float32) - 6

    def ours(x, floats):
        arrays = dict(floats)
        bias = arrays.pop("bias")
        return gemv(x, QuantizedTensor(packed=p.packed, bits=4, **arrays), bias=bias, implementation=backend)

    return ours, lambda x, floats: plain(x, codes, **floats), jnp.asarray(p.x), floats


# Where the form of the weight has no part in it.
once = pytest.mark.parametrize("both", params_of(BOTH[::2]), indirect=True)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_grad(both):
    """With respect to x and to every float array of the weight, in one."""
    ours, other, x, floats = both
    weights = jnp.arange(30.0).reshape(3, 10) - 15

    def loss(f):
        return lambda x, floats: jnp.sum(f(x, floats) * weights)

    same(jax.grad(loss(ours), (0, 1))(x, floats), jax.grad(loss(other), (0, 1))(x, floats))
    same(jax.jit(jax.grad(loss(ours)))(x, floats), jax.grad(loss(other))(x, floats))


def test_jvp_and_linearize(both):
    ours, other, x, floats = both
    tangents = (jnp.ones_like(x), jax.tree.map(jnp.ones_like, floats))
    same(jax.jvp(ours, (x, floats), tangents), jax.jvp(other, (x, floats), tangents))
    y, linear = jax.linearize(ours, x, floats)
    same((y, linear(*tangents)), jax.jvp(other, (x, floats), tangents))


def test_vjp(both):
    ours, other, x, floats = both
    y, pull = jax.vjp(ours, x, floats)
    expected, other_pull = jax.vjp(other, x, floats)
    same((y, pull(y)), (expected, other_pull(y)))


@once
def test_hessian(both):
    """Of a loss that is quadratic in x, forward over reverse and reverse over forward."""
    ours, other, x, floats = both

    def loss(f):
        return lambda v: jnp.sum(f(x.at[0, :4].set(v), floats)[0] ** 2)

    expected = jax.hessian(loss(other))(x[0, :4])
    same(jax.hessian(loss(ours))(x[0, :4]), expected)
    same(jax.jacrev(jax.jacfwd(loss(ours)))(x[0, :4]), expected)


@once
def test_jit_of_vmap_of_grad(both):
    """Per-row gradients, and the gradient of a vmapped product."""
    ours, other, x, floats = both

    def loss(f):
        return lambda row: jnp.sum(f(row, floats) ** 2)

    expected = jax.vmap(jax.grad(loss(other)))(x)
    same(jax.jit(jax.vmap(jax.grad(loss(ours))))(x), expected)
    same(jax.grad(lambda x: jnp.sum(jax.vmap(loss(ours))(x)))(x), expected)


@once
def test_checkpoint(both):
    ours, other, x, floats = both
    remat = jax.checkpoint(ours)
    same(jax.grad(lambda x: jnp.sum(remat(x, floats)))(x), jax.grad(lambda x: jnp.sum(other(x, floats)))(x))


def with_vjp(f):
    """A rule of the user's around a product: its own derivative, doubled, so that one sees that it was asked."""

    def backward(kept, ct):
        return tuple(2 * g for g in jax.vjp(f, *kept)[1](ct))

    g = jax.custom_vjp(lambda x, scale: f(x, scale))
    g.defvjp(lambda x, scale: (f(x, scale), (x, scale)), backward)
    return g


def with_jvp(f):
    g = jax.custom_jvp(lambda x, scale: f(x, scale))

    @g.defjvp
    def _(primals, tangents):
        y, t = jax.jvp(f, primals, tangents)
        return y, 2 * t

    return g


WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x, scale: jax.vmap(f, (0, None))(x, scale),
}


@compiled
@pytest.mark.parametrize(
    ("rule", "order"),
    [
        (rule, order)
        for i, order in enumerate(permutations(WRAPPERS))
        for rule in (with_vjp, with_jvp)[i % 2 :][:1]
    ],
)
def test_custom_rules(backend, rule, order, rng):
    """A rule inside jit, checkpoint and vmap in any order, and grad around all of them or inside of all."""
    p = make(rng, 4, "float32", CASE, exact=True)

    def ours(x, scale):
        w = QuantizedTensor(packed=p.packed, scale=scale, zero=p.zero, bits=4)
        return gemv(x, w, bias=p.bias, implementation=backend)

    def other(x, scale):
        return plain(x, np.asarray(unpack(p.packed, 4, 48), np.float32), scale, p.zero, bias=p.bias)

    def wrapped(f):
        return reduce(lambda g, name: WRAPPERS[name](g), order, rule(f))

    def loss(f):
        return lambda x, scale: jnp.sum(f(x, scale) * weights)

    x, scale, weights = jnp.asarray(p.x), jnp.asarray(p.scale), jnp.arange(30.0).reshape(3, 10) - 15
    once = jax.grad(loss(other), (0, 1))(x, scale)
    twice = jax.tree.map(lambda g: 2 * g, once)
    same(jax.grad(loss(wrapped(ours)), (0, 1))(x, scale), twice)
    # The other way round: per-row gradients of the rule, in all three.
    rows = reduce(
        lambda g, name: WRAPPERS[name](g), order, jax.grad(lambda x, s: jnp.sum(rule(ours)(x, s) ** 2))
    )
    expected = jax.vmap(jax.grad(lambda x, s: jnp.sum(other(x, s) ** 2)), (0, None))(x, scale)
    same(rows(x, scale), 2 * expected)


@once
def test_orders(both):
    """Transformations composed in any order; each product is the other's transpose."""
    ours, other, x, floats = both
    ct = jnp.arange(30.0).reshape(3, 10) % 7 - 3

    def pulled(f):
        return lambda ct: jax.vjp(lambda x: f(x, floats), x)[1](ct)[0]

    orders = {
        "the transpose of a transpose": lambda f: jax.vjp(pulled(f), ct)[1](x),
        "tangents of a transpose": lambda f: jax.jvp(pulled(f), (ct,), (2 * ct,)),
        "linearized": lambda f: jax.linearize(pulled(f), ct)[1](ct),
        "linear_transpose of linearize": lambda f: jax.linear_transpose(
            jax.linearize(lambda x: f(x, floats), x)[1], x
        )(ct),
        "twice transposed": lambda f: jax.linear_transpose(
            lambda ct: jax.linear_transpose(lambda x: f(x, floats), x)(ct)[0], ct
        )(x),
        "vmap of a transpose": lambda f: jax.vmap(pulled(f))(jnp.stack([ct, ct + 1])),
        "grad of vmap of grad": lambda f: jax.grad(
            lambda ct: jnp.sum(jax.vmap(jax.grad(lambda c: jnp.sum(pulled(f)(c) ** 2)))(ct))
        )(jnp.stack([ct, ct + 1])),
        "checkpoint of grad": lambda f: jax.grad(
            jax.checkpoint(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, floats) ** 2))(x) * x))
        )(x),
        "in scan": lambda f: jax.grad(
            lambda x: jax.lax.scan(
                lambda c, x: (c + jnp.sum(f(x, floats) ** 2), None), 0.0, jnp.stack([x, x])
            )[0]
        )(x),
    }
    for name, order in orders.items():
        try:
            same(order(ours), order(other))
        except AssertionError as error:
            raise AssertionError(name) from error


def test_floats_in_a_transposed_product(both):
    """Gradients with respect to the weight's arrays of a function that has x's gradient in it."""
    ours, other, x, floats = both

    def penalty(f):
        return lambda floats: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, floats)))(x) * x)

    same(jax.grad(penalty(ours))(floats), jax.grad(penalty(other))(floats))
    same(
        jax.jvp(penalty(ours), (floats,), (jax.tree.map(jnp.ones_like, floats),)),
        jax.jvp(penalty(other), (floats,), (jax.tree.map(jnp.ones_like, floats),)),
    )


def test_linear_transpose(backend, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    transposed = jax.linear_transpose(lambda x: gemv(x, p.tensor, implementation=backend), p.x)
    ct = rng.integers(-3, 4, (3, 10)).astype(np.float32)
    np.testing.assert_array_equal(transposed(ct)[0], ct @ p.weight())


def test_linear_transpose_of_two(backend, rng):
    """Of x and the bias, in which the product is linear together."""
    p = make(rng, 4, "float32", CASE, exact=True)
    f = jax.linear_transpose(lambda x, b: gemv(x, p.tensor, bias=b, implementation=backend), p.x, p.bias)
    ct = rng.integers(-3, 4, (3, 10)).astype(np.float32)
    dx, dbias = f(ct)
    np.testing.assert_array_equal(dx, ct @ p.weight())
    np.testing.assert_array_equal(dbias, ct.sum(0))


def test_linear_transpose_of_factors(rng):
    """As of jnp's products, there is none."""
    p = make(rng, 4, "float32", CASE)

    def f(x, scale):
        return gemv(x, dataclasses.replace(p.tensor, scale=scale))

    with pytest.raises(ValueError, match="gemv: it is not linear in scale and x together"):
        jax.linear_transpose(f, p.x, p.tensor.scale)(np.ones((3, 10), np.float32))


def test_one_byte_floats_have_no_derivative(rng):
    for format in ("nvfp4", "mxfp8"):
        w = quantize(rng.standard_normal((12, 64), np.float32), format=format)
        of = jax.grad(lambda w: w.dequantize().sum() + w[np.arange(3)].dequantize().sum(), allow_int=True)(w)
        for a in (of.scale, of.packed):
            if format == "nvfp4" or a is of.packed:
                assert a.dtype == jax.dtypes.float0 or not np.asarray(a, np.float32).any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width(bits, rng):
    p = make(rng, bits, "float32", CASE, exact=True)
    grad = jax.grad(lambda x: gemv(x, p.tensor).sum())(p.x)
    np.testing.assert_array_equal(grad, np.broadcast_to(p.weight().sum(0), (3, 48)))


@pytest.mark.parametrize("x", ["float16", "bfloat16"])
def test_dtypes(backend, x, rng):
    """A cotangent has the dtype of what it belongs to."""
    p = make(rng, 4, x, CASE, exact=True, scale_dtype="float32")

    def f(x, scale, bias):
        w = QuantizedTensor(packed=p.packed, scale=scale, zero=p.zero, bits=4)
        return gemv(x, w, bias=bias, out_dtype="float32", implementation=backend).sum()

    grads = jax.grad(f, (0, 1, 2))(*map(jnp.asarray, (p.x, p.scale, p.bias)))
    assert [g.dtype for g in grads] == [p.x.dtype, jnp.float32, p.bias.dtype]
    np.testing.assert_array_equal(grads[0], np.broadcast_to(p.weight().sum(0), (3, 48)).astype(p.x.dtype))
    np.testing.assert_array_equal(grads[2], np.full(10, 3))


def test_codes_have_no_gradient(backend, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    grads = jax.grad(lambda w: gemv(p.x, w, implementation=backend).sum(), allow_int=True)(p.tensor)
    assert grads.packed.dtype == jax.dtypes.float0
    assert grads.scale.dtype == jnp.float32


@pytest.mark.parametrize("zero", [np.int32, np.int8])
def test_integer_zero_has_no_gradient(zero, rng):
    p = make(rng, 4, "float32", CASE, exact=True)

    def f(scale, z):
        return gemv(p.x, QuantizedTensor(packed=p.packed, scale=scale, zero=z, bits=4)).sum()

    scale, z = jax.grad(f, (0, 1), allow_int=True)(p.scale, p.zero.astype(zero))
    assert z.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(scale, jax.grad(f)(p.scale, p.zero))


def test_stack(backend, rng):
    """Through index and through vmap over weights: the gradients of the layers that were used."""
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(3)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    x = problems[0].x

    def indexed(x, scale, i):
        stack = QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4)
        return gemv(x, stack, index=i, implementation=backend).sum()

    dx, dscale = jax.grad(indexed, (0, 1))(x, w.scale, 1)
    np.testing.assert_array_equal(dx, np.broadcast_to(problems[1].weight().sum(0), dx.shape))
    assert (np.asarray(dscale) != 0).any(axis=(1, 2)).tolist() == [False, True, False]

    dx = jax.grad(lambda x: jax.vmap(lambda w: gemv(x, w, implementation=backend))(w).sum())(x)
    expected = sum(p.weight().sum(0) for p in problems)
    np.testing.assert_array_equal(dx, np.broadcast_to(expected, dx.shape))


def test_dense(rng):
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 20), (6, 20)))
    same(
        jax.grad(lambda x, w: gemv(x, w).sum(), (0, 1))(x, w),
        jax.grad(lambda x, w: (x @ w.T).sum(), (0, 1))(x, w),
    )


def test_of_bias_alone(on_cpu, monkeypatch, rng):
    """Outside jit too the weight is not dequantised for it."""
    w = quantize(jnp.asarray(rng.standard_normal((4, 12, 64)), jnp.float32), group_size=32)
    x, bias = jnp.ones((3, 64)), jnp.asarray(rng.standard_normal((4, 12)), jnp.float32)
    monkeypatch.delattr(_reference, "product")
    index = jnp.array([3, 0, 9])  # of which the last is not there
    for i, weights in ((index, [1, 0, 0, 1]), (2, [0, 0, 3, 0])):

        def f(b, i=i):
            return gemv(x, w, bias=b, index=i, implementation="cpu")

        y, dy = jax.jvp(f, (bias,), (bias,))
        np.testing.assert_array_equal(dy, jnp.where(jnp.isnan(y), jnp.nan, bias[jnp.clip(i, 0, 3)]))
        grad = jax.grad(lambda b, f=f: jnp.nansum(f(b)))(bias)
        np.testing.assert_array_equal(grad, jnp.broadcast_to(jnp.array(weights)[:, None], (4, 12)))
