"""norm, activation and residual under every transformation; test_fused.py has their values."""

import dataclasses
import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import compiled
from parts import EPS
from problems import Case, make

import jaxgemv
from jaxgemv import gemv

M, N, K, S = 4, 16, 128, 3
CASE = Case(M, N, K, 32, "zero", bias=True)


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


@compiled
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
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


@compiled
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
    ("norm",),
    ("x", "bias", "residual"),
    ("w",),
    ("x", "w", "norm", "bias", "residual"),
]


@compiled
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
    (ValueError, "eps must be a number, 0 or more; got nan", {"eps": float("nan")}),
    (ValueError, "eps must be a number, 0 or more; got 1e+300", {"eps": 1e300}),
    (ValueError, f"eps must be a number, 0 or more; got {10**400}", {"eps": 10**400}),
    (TypeError, "round_norm must be True or False; got 1", {"round_norm": 1}),
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


@pytest.mark.parametrize("eps", [np.float32(1e-5), np.float16(1e-3), np.int64(1)])
def test_eps_of_numpy(p, eps):
    norm = np.ones(X.shape[1], np.float32)
    expected = gemv(X, p.tensor, norm=norm, eps=float(eps))
    np.testing.assert_array_equal(gemv(X, p.tensor, norm=norm, eps=eps), expected)


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
