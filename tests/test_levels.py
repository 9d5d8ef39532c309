"""The CPU's kernels, each by its name and in each instruction set: many rows, each way in which x may be taken."""

import contextlib
import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from tolerance import assert_close

from jaxgemv import QuantizedTensor, gemv, gemv_int4
from jaxgemv._ffi import TARGET, backends, cpu_isa, cpu_isas, last_kernel, set_cpu_isa, use_only

ISAS = cpu_isas()
ACTIVATIONS = [None, "relu", "silu", "gelu", "gelu_exact", "swiglu", "geglu"]


@contextlib.contextmanager
def only(name):
    use_only("cpu", name)
    try:
        yield
    finally:
        use_only("cpu", "")


def test_the_table_follows_the_isa():
    """What lowering asks is the table of the instruction set in use, and not that of the best one."""
    if "portable" not in ISAS[1:]:
        pytest.skip("this processor has one instruction set")

    def calls(rows):
        args = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((6, 8), jnp.uint32)
        text = (
            jax.jit(lambda x, w: gemv_int4(x, w, None, 1.0)).trace(*args).lower(lowering_platforms=("cpu",))
        )
        return text.as_text().count(f"@{TARGET}(")

    best = backends["cpu"]
    set_cpu_isa("portable")
    try:
        assert cpu_isa() == "portable"
        assert backends["cpu"].most_rows == 64
        assert calls(64) == 1
        assert calls(best.most_rows) == (best.most_rows <= 64)
    finally:
        set_cpu_isa(ISAS[0])
    assert backends["cpu"] == best
    assert calls(best.most_rows) == 1
    with pytest.raises(ValueError, match="this processor has no instruction set sse9"):
        set_cpu_isa("sse9")


@pytest.fixture
def isa(level):
    """Each instruction set of this processor."""
    return level


def check(p):
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation="cpu")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32)


# Which kernel

# Rows of x and widths that each has to take, with whole groups of 128.
TAKES = {
    "int8_dot": ([1, 2], [1, 2, 4, 8]),
    "f32_panel": ([1, 2, 7, 33], range(1, 9)),
    "amx_int8": ([1, 2, 5, 17, 40], [1, 2, 4, 8]),
    "amx_bf16": ([1, 3, 12, 33], [1, 2, 4]),
}
BY_NAME = [(name, m, bits) for name, (rows, widths) in TAKES.items() for m in rows for bits in widths]


def has(name):
    return any(kernel.name == name for kernel in backends["cpu"].kernels)


@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "m", "bits"), BY_NAME)
@pytest.mark.numerics
def test_by_name(isa, name, m, bits, x, rng):
    if not has(name):
        pytest.skip(f"{isa} has no {name}")
    p = make(rng, bits, x, Case(m, 75, 1100, 128, "zero", bias=True))
    with only(name):
        if name == "amx_bf16" and x == "float32":
            with pytest.raises(Exception, match="no cpu kernel that may run"):
                check(p)
            return
        check(p)
        assert last_kernel("cpu") == name


@pytest.mark.parametrize("group", [128, 24, 7])
def test_transposed_by_name(isa, group, rng):
    p = make(rng, 4, "float32", Case(3, 75, 1100, group, "zero"))
    _, back = jax.vjp(lambda x: gemv(x, p.tensor, implementation="cpu"), p.x)
    with only("transposed"):
        (dx,) = back(np.ones((3, 75), np.float32))
        assert last_kernel("cpu") == "transposed"
    np.testing.assert_allclose(dx, np.ones((3, 75)) @ p.weight(), rtol=1e-4, atol=1e-3)


def test_chosen(isa, rng):
    """By rows of x, and by whether groups suit."""
    for m, group, expected in [
        (1, 128, "int8_dot"),
        (2, 128, "amx_int8" if isa == "amx" else "int8_dot"),
        (3, 128, "amx_int8" if isa == "amx" else "f32_panel"),
        (12, 128, "amx_bf16" if isa == "amx" else "f32_panel"),
        (1, 7, "f32_panel"),
    ]:
        if expected == "int8_dot" and not has(expected):
            expected = "f32_panel"
        check(make(rng, 4, "bfloat16", Case(m, 40, 512, group)))
        assert last_kernel("cpu") == expected, (m, group)


def test_the_only_kernel_cannot(isa, rng):
    """An error, and not another kernel."""
    if not has("int8_dot"):
        pytest.skip(f"{isa} has no int8_dot")
    with only("int8_dot"):
        for p in (make(rng, 3, "float32", Case(1, 40, 512)), make(rng, 4, "float32", Case(3, 40, 512))):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match="no cpu kernel that may run takes this call"
            ):
                check(p)
        p = unsuitable(make(rng, 4, "float32", Case(1, 40, 512)), 1e-30)
        with pytest.raises(Exception, match="does not take these values of x"):
            check(p)
    check(p)
    assert last_kernel("cpu") == "f32_panel"


def unsuitable(p, extreme):
    values = p.x.copy()
    values[-1, p.k // 2 + 3] = extreme
    return dataclasses.replace(p, x=values)


# Parts around the product


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 2, 5, 20])
@pytest.mark.parametrize("name", TAKES)
@pytest.mark.numerics
def test_parts(isa, name, m, activation, x, rng):
    """In each kernel, with halves of rows that are no whole blocks; against float64."""
    if not has(name) or (name == "int8_dot" and m > 2):
        pytest.skip(f"{isa} has no such kernel")
    if name == "amx_bf16" and x == "float32":
        pytest.skip("not for float32 x")
    n, k = 2 * 83, 1100
    p = make(rng, 4, x, Case(m, n, k, 128, "zero", bias=True))
    gated = activation in ("swiglu", "geglu")
    residual = rng.standard_normal((m, n // 2 if gated else n)).astype(np.float16)
    norm = None if name == "amx_bf16" else rng.uniform(0.5, 1.5, k).astype(jnp.bfloat16)
    f = partial(gemv, bias=p.bias, norm=norm, eps=1e-3, activation=activation, residual=residual)
    f = jax.jit(partial(f, out_dtype="float32", implementation="cpu"))
    with only(name):
        y = f(p.x, p.tensor)
        assert last_kernel("cpu") == name
    text = f.trace(p.x, p.tensor).lower().as_text()
    assert text.count(f"@{TARGET}(") == 1
    if x == "bfloat16":
        assert f"tensor<{m}x{k}xf32>" not in text
    h = np.asarray(p.x, np.float64)
    if norm is not None:
        h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(norm, np.float64)
    sums = h @ p.weight().T + np.asarray(p.bias, np.float64)
    magnitude = np.abs(h) @ p.weight_magnitude().T + np.abs(np.asarray(p.bias, np.float64))
    exact = activated(sums, activation) + residual
    if gated:
        gate, up = np.split(sums, 2, -1)
        first, second = np.split(magnitude, 2, -1)
        magnitude = 1.2 * (first * np.abs(up) + second * np.abs(gate))
    assert_close(y, exact, 1.2 * magnitude + np.abs(exact) + np.abs(residual), k, dtype=jnp.float32)


def activated(y, activation):
    """float64, spelled out."""
    if activation in ("swiglu", "geglu"):
        gate, up = np.split(y, 2, axis=-1)
        return activated(gate, {"swiglu": "silu", "geglu": "gelu"}[activation]) * up
    exp = lambda t: np.exp(np.minimum(t, 700))  # noqa: E731
    return {
        None: lambda y: y,
        "relu": lambda y: np.maximum(y, 0),
        "silu": lambda y: y / (1 + exp(-y)),
        "gelu": lambda y: y / (1 + exp(-2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
        "gelu_exact": lambda y: y / 2 * np.vectorize(math.erfc)(-y / 2**0.5),
    }[activation](y)


@pytest.mark.parametrize("activation", ACTIVATIONS[:5])
def test_activations_as_functions(isa, activation):
    """Of numbers that are exact: a few roundings, more only where an exponential is small."""
    y = np.concatenate([np.linspace(-40, 40, 4001), [-1e30, 1e30, np.inf, np.nan]]).astype(np.float32)
    w = QuantizedTensor(packed=np.zeros((len(y), 1), np.uint32), scale=np.ones((), np.float32), bits=4)
    got = gemv(np.zeros((1, 8), np.float32), w, bias=y, activation=activation, implementation="cpu")[0]
    assert np.isnan(got[-1])
    assert got[-2] == np.inf
    y, got = y[:-2].astype(np.float64), got[:-2]
    exact = activated(y, activation)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = -np.log(np.abs(exact / y))  # of the share of y that is left
    roundings = np.nan_to_num(1 + np.maximum(exponent, 0), nan=1, posinf=1e3)
    tolerance = 4 * roundings * np.finfo(np.float32).eps * np.abs(exact) + 64 * np.finfo(np.float32).tiny
    np.testing.assert_array_less(np.abs(got - exact) / (tolerance + (exact == y)), 1)


@pytest.mark.parametrize("m", [1, 3])
def test_residual_in_place(isa, m, rng):
    """Each element is finished once, also where the last rows are repeated."""
    p = make(rng, 4, "float32", Case(m, 70, 256, 64), exact=True)
    f = jax.jit(lambda r, x, w: gemv(x, w, residual=r, implementation="cpu"), donate_argnums=0)
    r = rng.integers(-9, 9, (m, 70)).astype(np.float32)
    np.testing.assert_array_equal(f(jnp.asarray(r), p.x, p.tensor), p.answer() + r)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_index_out_of_range(isa, activation, rng):
    """NaN through everything, and neither weights nor norm are read."""
    problems = [make(rng, 4, "float32", Case(4, 16, 128, 32)) for _ in range(2)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    y = gemv(
        problems[0].x,
        w,
        index=np.array([0, 2, -1, 1], np.int32),
        norm=np.ones((2, 128), np.float32),
        activation=activation,
        residual=np.ones((4, 8 if activation in ("swiglu", "geglu") else 16), np.float32),
        implementation="cpu",
    )
    np.testing.assert_array_equal(np.isnan(y).any(-1), [False, True, True, False])
    assert np.isnan(y[1:3]).all()


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(), (70,), (70, 16)])
def test_one_byte_scales(isa, shape, dtype, m, rng):
    """Every byte that is a number, in products and gradients; NaN for those that are none."""
    p = make(rng, 4, "float32", Case(m, 70, 512, 32 if len(shape) == 2 else "row"))
    codes = rng.integers(120, 135, shape) if dtype.endswith("fnu") else rng.integers(0, 127, shape)
    scale = np.asarray(codes, np.uint8).view(dtype)
    w = dataclasses.replace(p.tensor, scale=scale)
    wide = dataclasses.replace(p.tensor, scale=scale.astype(np.float32))
    f = jax.jit(partial(gemv, implementation="cpu"))
    np.testing.assert_array_equal(f(p.x, w), f(p.x, wide))
    assert f.trace(p.x, w).lower().as_text().count(f"@{TARGET}(") == 1
    y = np.ones((m, 70), np.float32)
    dx, wide_dx = (jax.vjp(lambda x, w=w: f(x, w), p.x)[1](y)[0] for w in (w, wide))
    np.testing.assert_array_equal(dx, wide_dx)
    nan = np.full(shape, 255, np.uint8).view(dtype)
    assert np.isnan(f(p.x, dataclasses.replace(w, scale=nan))).all()


def test_every_byte(isa):
    """As JAX reads them. (Where x is fixed point, scales below 2^-97 are lost.)"""
    for dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
        scale = np.arange(1, 256, dtype=np.uint8).view(dtype)  # XLA's threads flush e8m0's 2^-127
        packed, zero = np.ones((255, 1), np.uint32), np.zeros((), np.float32)
        for m in (1, 3):
            with only("f32_panel"):
                y = gemv_int4(np.ones((m, 1), np.float32), packed, zero, scale, implementation="cpu")
            np.testing.assert_array_equal(y[-1], scale.astype(np.float32))


# Rows, groups, values of x


# Tiles of columns hold 16: from one that is half empty to several that are not whole.
@pytest.mark.parametrize("m", [2, 3, 5, 8, 12, 17, 33, 65, 513])
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_rows(isa, bits, x, m, rng):
    check(make(rng, bits, x, Case(m, 75, 1100, 128, "zero", bias=True)))


@pytest.mark.parametrize("group", [16, 24, 32, 96, 192, 384, 1000, "row"])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_groups(isa, bits, m, group, rng):
    """Whole blocks of codes, parts of them, and neither."""
    check(make(rng, bits, "float32", Case(m, 70, 2100, group, "offset")))


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("extreme", [1e-30, 1e-12, 1e5, 1e30])
@pytest.mark.parametrize("m", [1, 8, 24])
def test_elements_too_different_for_integers(isa, m, extreme, x, rng):
    """In one row of many, that one of several threads arranges."""
    p = make(rng, 4, x, Case(m, 64, 8192, 128, "zero"))
    values = p.x.copy()
    values[-1, 5000] = extreme
    check(dataclasses.replace(p, x=values))


@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1.0, 1e19, 1e25])
@pytest.mark.parametrize("m", [1, 8, 24])
def test_small_and_large_x(isa, m, scale, rng):
    p = make(rng, 4, "float32", Case(m, 40, 1024, 128, "mid"))
    check(dataclasses.replace(p, x=(p.x * scale).astype(np.float32)))


def test_zeros_and_rows_of_zeros(isa, rng):
    p = make(rng, 4, "float32", Case(24, 40, 1024, 128, "zero"), exact=True)
    values = p.x * (np.arange(24) % 3 > 0)[:, None]
    p = dataclasses.replace(p, x=values.astype(np.float32))
    y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_slices_with_weights_of_their_own(isa, x, rng):
    """Several slices of x, each arranged by itself."""
    p = make(rng, 4, x, Case(3 * 8, 40, 4096, 128, "zero"))
    stacked = [np.stack([a, a, a]) for a in (p.packed, p.scale, p.zero)]
    w = dataclasses.replace(p.tensor, packed=stacked[0], scale=stacked[1], zero=stacked[2])
    y = gemv(p.x.reshape(3, 8, -1), w, index=np.arange(3), out_dtype="float32", implementation="cpu")
    assert_close(y.reshape(24, -1), p.answer(), p.magnitude(), p.k, dtype=jnp.float32)
