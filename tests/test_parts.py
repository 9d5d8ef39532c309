"""norm, activation and residual: what they mean, on every backend, and under every transformation."""

import dataclasses
import re
from functools import partial
from math import erf

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from tolerance import assert_close

import jaxgemv
from jaxgemv import gemv, reference

M, N, K, S = 4, 16, 128, 3
CASE = Case(M, N, K, 32, "zero", bias=True)
ACTIVATIONS = ["relu", "silu", "gelu", "gelu_exact", "swiglu", "geglu"]
EPS = 1e-3


def activated(y, activation):
    """float64, spelled out."""
    if activation in ("swiglu", "geglu"):
        gate, up = np.split(y, 2, axis=-1)
        return activated(gate, {"swiglu": "silu", "geglu": "gelu"}[activation]) * up
    if activation == "gelu_exact":
        return y * np.vectorize(lambda t: (1 + erf(t / 2**0.5)) / 2)(y)
    return {
        None: lambda y: y,
        "relu": lambda y: np.where(y < 0, 0, y),
        "silu": lambda y: y / (1 + np.exp(-y)),
        "gelu": lambda y: y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
    }[activation](y)


@pytest.fixture
def p(rng):
    return make(rng, 4, "float32", CASE)


def operands(rng, activation=None, m=M):
    norm = rng.uniform(0.5, 1.5, K).astype(np.float32)
    residual = rng.standard_normal((m, N // 2 if activation in ("swiglu", "geglu") else N)).astype(np.float32)
    return norm, residual


def plain(x, w, norm, bias, residual, activation):
    """The same in jax.numpy, of a dense weight: for derivatives."""
    h = x if norm is None else x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * norm
    y = jnp.dot(h, w.T, precision="highest") + bias
    if activation in ("swiglu", "geglu"):
        gate, up = jnp.split(y, 2, -1)
        y = (jax.nn.silu if activation == "swiglu" else jax.nn.gelu)(gate) * up
    elif activation:
        y = {
            "relu": jax.nn.relu,
            "silu": jax.nn.silu,
            "gelu": jax.nn.gelu,
            "gelu_exact": partial(jax.nn.gelu, approximate=False),
        }[activation](y)
    return y if residual is None else y + residual


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("parts", ["norm", "residual", "norm residual", ""])
def test_float64(backend, activation, parts, x_dtype, rng):
    """h in float32, every part in float32, and one rounding at the end."""
    p = make(rng, 4, x_dtype, CASE)
    norm, residual = operands(rng, activation)
    given = {"norm": norm} if "norm" in parts else {}
    given |= {"residual": residual} if "residual" in parts else {}
    y = gemv(p.x, p.tensor, bias=p.bias, activation=activation, eps=EPS, implementation=backend, **given)
    x = np.asarray(p.x, np.float64)
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm if "norm" in given else x
    sums = h @ p.weight().T + np.asarray(p.bias, np.float64)
    magnitude = np.abs(h) @ p.weight_magnitude().T + np.abs(np.asarray(p.bias, np.float64))
    exact = activated(sums, activation) + (residual if "residual" in given else 0)
    if activation in ("swiglu", "geglu"):
        # Either half's error times the other, both with room for the slope of the gate, which is below 1.13.
        gate, up = np.split(sums, 2, -1)
        first, second = np.split(magnitude, 2, -1)
        magnitude = 1.2 * (first * np.abs(up) + second * np.abs(gate)) + np.abs(exact)
    magnitude = 1.2 * magnitude + np.abs(exact) + (np.abs(residual) if "residual" in given else 0)
    assert_close(y, exact, magnitude, K, dtype=jnp.dtype(x_dtype), worst=True)


@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
def test_kernel_and_reference_agree_on_special_values(activation, backend, rng):
    """NaN goes through relu; a bad index gives NaN through every activation; -inf does not become NaN in relu."""
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(S)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    x = problems[0].x.copy()
    x[1, 3] = np.nan
    ids = np.array([0, 1, S, 2], np.int32)
    y = gemv(x, w, index=ids, activation=activation, implementation=backend)
    np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(y).any(-1), [False, True, True, False])
    expected = reference.gemv(x, w, index=ids, activation=activation)
    if activation == "relu":
        np.testing.assert_array_equal(y, expected)


def test_dense(p, rng):
    norm, residual = operands(rng, "swiglu")
    given = {"norm": norm, "residual": residual, "activation": "swiglu", "eps": EPS}
    w = p.tensor.dequantize(jnp.float32)
    y = gemv(p.x, w, bias=p.bias, **given)
    np.testing.assert_allclose(y, plain(p.x, w, norm, p.bias, residual, "swiglu"), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(y, gemv(p.x, p.tensor, bias=p.bias, **given), rtol=1e-4, atol=1e-3)


def test_one_kernel(p, rng):
    """They are composed around it, and no dequantised matrix appears."""
    norm, residual = operands(rng)
    f = partial(gemv, norm=norm, activation="silu", residual=residual, implementation="cpu")
    text = jax.jit(f).trace(p.x, p.tensor).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("custom_call @jaxgemv") == 1
    assert f"tensor<{N}x{K}xf32>" not in text
    jaxpr = jax.make_jaxpr(f)(p.x, jax.tree.map(jnp.asarray, p.tensor))
    assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["jaxgemv_gemv"]


# Transformations


def whole(p, activation, implementation):
    """As a function of everything that is differentiable."""

    def f(x, norm, bias, residual, scale, zero, global_scale):
        w = dataclasses.replace(p.tensor, scale=scale, zero=zero, global_scale=global_scale)
        return gemv(
            x,
            w,
            norm=norm,
            eps=EPS,
            bias=bias,
            residual=residual,
            activation=activation,
            implementation=implementation,
        )

    def g(x, norm, bias, residual, scale, zero, global_scale):
        q = jaxgemv.unpack(p.packed, 4, K).astype(jnp.float32)
        wide = partial(jnp.repeat, repeats=32, axis=-1)
        return plain(x, (q - wide(zero)) * wide(scale) * global_scale, norm, bias, residual, activation)

    return f, g


def arguments(p, rng, activation):
    norm, residual = operands(rng, activation)
    return tuple(map(jnp.asarray, (p.x / 8, norm, p.bias, residual, p.scale / 8, p.zero, np.float32(0.5))))


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_derivatives(backend, p, activation, rng):
    f, g = whole(p, activation, backend)
    args = arguments(p, rng, activation)
    every = tuple(range(len(args)))
    ct = rng.standard_normal(jax.eval_shape(f, *args).shape).astype(np.float32)
    for one, other in zip(
        jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) * ct), every))(*args),
        jax.jit(jax.grad(lambda *a: jnp.sum(g(*a) * ct), every))(*args),
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())
    tangents = tuple(jnp.asarray(rng.standard_normal(a.shape).astype(np.float32)) for a in args)
    one, other = (jax.jvp(h, args, tangents)[1] for h in (f, g))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


def test_second_derivatives(backend, p, rng):
    f, g = whole(p, "silu", backend)
    args = arguments(p, rng, "silu")
    t = jnp.asarray(rng.standard_normal(p.x.shape).astype(np.float32))
    one, other = (
        jax.jvp(lambda x, h=h: jax.grad(lambda x: jnp.sum(h(x, *args[1:]) ** 2))(x), args[:1], (t,))[1]
        for h in (f, g)
    )
    np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3 * np.abs(other).max())


def test_linear_transpose(backend, p, rng):
    """Of what is linear; of the rest an error and no wrong number."""
    norm, residual = operands(rng)
    w = p.tensor
    f = lambda r: gemv(p.x, w, residual=r, norm=norm, activation="silu", implementation=backend)  # noqa: E731
    (back,) = jax.linear_transpose(f, residual)(jnp.asarray(residual))
    np.testing.assert_array_equal(back, residual)
    perm = dataclasses.replace(w, perm=np.arange(K, dtype=np.int32)[::-1].copy(), global_scale=np.float32(2))
    (dx,) = jax.linear_transpose(lambda x: gemv(x, perm, implementation=backend), p.x)(jnp.asarray(residual))
    np.testing.assert_allclose(dx, residual @ np.asarray(perm.dequantize()), rtol=1e-4, atol=1e-3)
    for given in ({"norm": norm}, {"activation": "relu"}):
        with pytest.raises(ValueError, match=r"gemv: with (norm|activation) it is not linear in x"):
            jax.linear_transpose(lambda x, given=given: gemv(x, w, **given), p.x)(jnp.asarray(residual))


MAPPED = [
    ("x",),
    ("residual",),
    ("norm",),
    ("bias",),
    ("x", "residual"),
    ("x", "norm"),
    ("w",),
    ("x", "w", "norm", "bias", "residual"),
]


@pytest.mark.parametrize("indexed", [False, True], ids=["", "indexed"])
@pytest.mark.parametrize("mapped", MAPPED, ids="-".join)
def test_vmap(backend, mapped, indexed, rng):
    """Over any of them; what is not mapped is the same for all. Against a loop."""

    def one():
        stack = [make(rng, 4, "float32", CASE, exact=True) for _ in range(S)]
        norm, residual = operands(rng, "swiglu")
        w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in stack)) if indexed else stack[0].tensor
        norm = np.stack([norm, 2 * norm, 3 * norm]) if indexed else norm
        return {"x": stack[0].x, "w": w, "norm": norm, "bias": stack[1].bias, "residual": residual}

    entries = [one() for _ in range(2)]
    ids = jnp.array([0, 2, S, 1]) if indexed else None

    def f(each):
        return gemv(
            each["x"],
            each["w"],
            index=ids,
            norm=each["norm"],
            eps=EPS,
            bias=each["bias"],
            residual=each["residual"],
            activation="swiglu",
            implementation=backend,
        )

    together = {
        name: jax.tree.map(lambda *a: jnp.stack(a), *(e[name] for e in entries))
        if name in mapped
        else entries[0][name]
        for name in entries[0]
    }
    y = jax.jit(jax.vmap(f, ({name: 0 if name in mapped else None for name in together},)))(together)
    for i, entry in enumerate(entries):
        expected = f({name: entry[name] if name in mapped else entries[0][name] for name in entry})
        np.testing.assert_allclose(y[i], expected, rtol=1e-4, atol=1e-3)


def test_scan(backend, rng):
    """Layers of a scan, each with a norm of its own; and by index."""
    problems = [make(rng, 4, "float32", Case(M, K, K, 32, "zero"), exact=True) for _ in range(S)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    w = dataclasses.replace(w, scale=w.scale / 64)
    norms = jnp.asarray(rng.uniform(0.5, 1.5, (S, K)).astype(np.float32))

    def layer(x, w, norm, **at):
        return gemv(x, w, norm=norm, activation="silu", residual=x, implementation=backend, **at)

    x = jnp.asarray(problems[0].x)
    scanned, _ = jax.lax.scan(lambda x, each: (layer(x, *each), None), x, (w, norms))
    indexed = jax.lax.fori_loop(0, S, lambda i, x: layer(x, w, norms, index=i), x)
    expected = x
    for i in range(S):
        expected = layer(expected, w[i], norms[i])
    np.testing.assert_allclose(scanned, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(indexed, expected, rtol=1e-4, atol=1e-4)


def test_residual_in_the_place_of_the_result(backend, p):
    """x.at[:2].set(gemv(..., residual=x[:2])), donated: exact overlap, and slices."""
    rng = np.random.default_rng(0)
    w = make(rng, 4, "float32", Case(M, K, K, 32, "zero"), exact=True)

    @partial(jax.jit, donate_argnums=0)
    def f(x, h, w):
        return x.at[:2].set(gemv(h[:2], w, residual=x[:2], implementation=backend))

    x = jnp.asarray(w.x)
    expected = np.concatenate([w.answer()[:2] + w.x[:2], w.x[2:]])
    np.testing.assert_array_equal(f(x + 0, jnp.asarray(w.x), w.tensor), expected)


def test_export(backend, p, rng):
    norm, residual = operands(rng, "geglu")
    (b,) = jax.export.symbolic_shape("b")
    w = jax.tree.map(jnp.asarray, p.tensor)
    f = jax.jit(
        lambda x, r: gemv(
            x, w, norm=norm, bias=p.bias, residual=r, activation="geglu", implementation=backend
        )
    )
    platforms = None if backend == "xla" else (backend,)
    specs = [jax.ShapeDtypeStruct((b, n), jnp.float32) for n in (K, N // 2)]
    exported = jax.export.export(f, platforms=platforms, disabled_checks=jaxgemv.EXPORT_CHECKS)(*specs)
    exported = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(exported.call(p.x, residual), f(p.x, residual), rtol=1e-5, atol=1e-5)


# Errors


X = np.ones((2, K), np.float32)
BAD = (
    (TypeError, "norm must be float16, bfloat16 or float32; got int32", {"norm": np.ones(K, np.int32)}),
    (ValueError, f"norm must have shape ({K},); got (1,)", {"norm": np.ones(1, np.float32)}),
    (ValueError, "eps must be a number, 0 or more; got -1", {"eps": -1}),
    (ValueError, "eps must be a number, 0 or more; got 'a'", {"eps": "a"}),
    (
        ValueError,
        "activation must be None or one of relu, silu, gelu, gelu_exact, swiglu, geglu; got 'tanh'",
        {"activation": "tanh"},
    ),
    (
        ValueError,
        f"residual must have the result's shape, (2, {N}); got ({N},)",
        {"residual": np.ones(N, np.float32)},
    ),
    (
        ValueError,
        f"residual must have the result's shape, (2, {N // 2}); got (2, {N})",
        {"residual": np.ones((2, N), np.float32), "activation": "swiglu"},
    ),
    (
        TypeError,
        "residual must be float16, bfloat16 or float32; got int8",
        {"residual": np.ones((2, N), np.int8)},
    ),
    (
        TypeError,
        "x must be float16, bfloat16 or float32 for norm; got int8",
        {"x": X.astype(np.int8), "norm": X[0]},
    ),
)


@pytest.mark.parametrize(("error", "text", "given"), BAD, ids=[text[:40] for _, text, _ in BAD])
def test_refused(p, error, text, given):
    given = dict(given)
    with pytest.raises(error, match="^" + re.escape("gemv: " + text) + "$"):
        gemv(given.pop("x", X), p.tensor, **given)


def test_swiglu_of_odd_rows(rng):
    p = make(rng, 4, "float32", CASE._replace(n=7))
    text = re.escape("gemv: w.packed must have an even number of rows for swiglu; got (7, 16)")
    with pytest.raises(ValueError, match=text):
        gemv(p.x, p.tensor, activation="swiglu")


def test_integer_products_have_no_parts(p):
    w = dataclasses.replace(p.tensor, scale=None, zero=None)
    for given in ({"activation": "relu"}, {"residual": np.ones((2, N), np.float32)}):
        with pytest.raises(ValueError, match="need scale; got scale=None"):
            gemv(X.astype(np.int8), w, **given)
