"""norm, bias, activation and residual by every kernel, whether it does them itself or XLA does them around it."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import must_take
from kernels import REFERENCE, ROUNDING, KernelParam, assert_ran, by_name, kernels, most_rows, products
from parts import ACTIVATIONS, EPS, answer, operands
from problems import Case, make
from test_kernels import of_rounding, telling
from test_lowering import calls, lowered, spec, with_kernels
from tolerance import assert_close, rounded

from jaxgemv import QuantizedTensor, gemv
from jaxgemv._ffi import backends

pytestmark = pytest.mark.kernels

# Rows of x; parts; activation. Each part alone, and all together; the edges of what kernels take as one.
ALL = "norm bias residual"
VARIANTS = (
    (1, "norm", None),
    (1, "residual", None),
    (2, "", "relu"),
    (3, "bias", "silu"),
    (3, "bias residual", None),
    (8, "norm", "gelu"),
    (9, "residual", "gelu_exact"),
    (16, "residual", None),
    (16, "", "swiglu"),
    (2, "norm", "geglu"),
    (1, ALL, "silu"),
    (2, ALL, "swiglu"),
    (9, ALL, None),
    (16, ALL, "geglu"),
    (17, ALL, "swiglu"),
    (64, ALL, "relu"),
    (70, "residual", None),
    (70, "bias residual", "relu"),
)
# Rows that a kernel takes, or with a format, where not any number of them up to 64.
ROWS = {
    "int8_dot": (1, 2),
    "bf16_dot": (1, 2),
    "f32_dot": (1, 2),
    "amx_int8": (2, 64),
    "amx_bf16": (12, 64),
    "stream": (1, 16),
    "wgmma_any": (3, 64),
    "wgmma_tma": (2, 64),
    ("bf16_weights", "affine"): (65, 70),
}
# Parts do not depend on the width, but for what they are fused into.
WIDTHS = {"float16": (2, 4, 8), "bfloat16": (2, 4, 5), "float32": (3, 4, 8)}


def is_fused(kernel: KernelParam, rows: int, needed: set[str]) -> bool:
    backend = backends[kernel.backend]
    most = backend.fused_rows if "norm" in needed else backend.epilogue_rows
    return needed <= kernel.operands and rows <= most


def takes_float32(kernel: KernelParam) -> bool:
    return any(k.name == kernel.name and k.x == "float32" for k in backends[kernel.backend].kernels)


@cache
def problem(
    bits: int, x: str, group: int, tail: int, rows: int, parts: str, activation: str | None, groups=3, n=42
):
    """Half of the outputs is an odd number, the last group a short one, and sums are where activations bend."""
    rng = np.random.default_rng(20251)
    p = make(rng, bits, x, Case(rows, n, groups * group + tail, group, "zero"))
    p = dataclasses.replace(p, scale=(p.scale * 2.0 ** -(bits + 4)).astype(p.scale.dtype))
    given = operands(rng, p, parts, activation, x)
    return p, given, answer(p, activation, **given)


@partial(jax.jit, static_argnames=("activations", "backend", "name"))
def whole(args, activations, backend: str, name: str = "") -> list[jax.Array]:
    """name: of a GPU's kernel, which has a program of its own: in a CUDA graph no other can take its place."""
    return [
        gemv(x, w, activation=activation, eps=EPS, implementation=backend, **given)
        for (x, w, given), activation in zip(args, activations)
    ]


def variants_of(kernel: KernelParam) -> list[tuple]:
    first, last = ROWS.get((kernel.name, kernel.format)) or ROWS.get(kernel.name, (1, 64))
    last = most_rows(kernel) or last
    found = []
    for rows, parts, activation in VARIANTS:
        needed = {*parts.split()} | ({"activation"} if activation else set())
        # Around a kernel the norm makes x float32, which is another one's.
        if kernel.name and not is_fused(kernel, rows, needed) and not takes_float32(kernel):
            parts = parts.replace("norm", "").strip()
        if first <= rows <= last:
            found.append((rows, parts, activation))
    return found


SOME = [k for k in kernels(transposed=False) if k.bits in WIDTHS[k.x]]


@by_name([*REFERENCE, *(k for k in SOME if k.backend == "cpu" or "activation" in k.operands)])
def test_parts(kernel):
    """In float32, and rounded once at the end."""
    run_parts(kernel, variants_of(kernel))


@by_name([k for k in SOME if "norm" in k.operands and k.bits == 4])
def test_norm_of_long_rows(kernel):
    """Several CTAs of a GPU share a row, and each knows the squares of its own part; of wgmma_tma from 16385 on."""
    groups = 131 if kernel.name == "wgmma_tma" else 51
    run_parts(kernel, [v for v in variants_of(kernel) if v[1] == ALL], groups=groups)


@by_name([k for k in SOME if k.name == "wgmma_tma"])
def test_whole_fours(kernel):
    """Of results, also in each half of those that are gated: in one CTA, and in several that share K."""
    variants = variants_of(kernel)
    run_parts(kernel, variants, n=96)
    run_parts(kernel, variants, groups=51, n=600)


@by_name([k for k in SOME if k.name == "stream" and k.x != "float32" and k.bits > 2])
def test_odd_rows_of_scales(kernel):
    """Those that begin in the middle of a word, and half of the outputs is an even number."""
    run_parts(kernel, variants_of(kernel), groups=4, n=44)


@pytest.mark.parametrize("group", [32, 64])
@by_name([k for k in SOME if k.name == "stream" and k.x != "float32" and 2 < k.bits < 8])
def test_small_groups(kernel, group):
    """Of one row, two of them share a block of codes."""
    variants = [v for v in variants_of(kernel) if v[0] == 1]
    tail = tail_of(kernel)
    for groups in (3, 52):  # and as many more as make rows of scales whole words
        run_parts(kernel, variants, groups + (groups + -(-tail // group)) % 2, group=group)


def tail_of(kernel: KernelParam) -> int:
    """Codes of a last group, so that a row is what a kernel takes: some take whole 16 bytes."""
    in_pieces = kernel.name in ("stream", "wgmma_tma")
    return 128 // math.gcd(128, kernel.bits) if in_pieces else 128 // kernel.bits // 8 * 8


def run_parts(
    kernel: KernelParam, variants: list[tuple], groups: int = 3, n: int = 42, group: int | None = None
):
    group = group or (64 if kernel.bits == 8 and kernel.name != "wgmma_tma" else 128)
    tail = tail_of(kernel)
    problems = [problem(kernel.bits, kernel.x, group, tail, *variant, groups, n) for variant in variants]
    args = [(p.x, p.tensor, given) for p, given, _ in problems]
    name = kernel.name if kernel.backend == "cuda" else ""
    ys = whole(args, tuple(activation for *_, activation in variants), kernel.backend, name)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for variant, y, (p, _, (exact, magnitude)) in zip(variants, ys, problems):
        with telling(variant):
            assert_close(y, exact, magnitude, p.k, dtype=p.x.dtype, worst=True, more=of_rounding(kernel, p))


@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
def test_norm_keeps_float32(backend, x, rng):
    """What is normalised is not rounded to x's dtype."""
    shapes = [(m, bits) for m in (1, 2, 3, 8, 16) for bits in (2, 4, 8)]
    problems = [make(rng, bits, x, Case(m, 64, 1024, 128, "zero")) for m, bits in shapes]
    given = [operands(rng, p, "norm", None, x) for p in problems]

    @jax.jit
    def f(args):
        return [gemv(x, w, eps=EPS, out_dtype="float32", implementation=backend, **g) for x, w, g in args]

    for shape, y, p, g in zip(
        shapes, f([(p.x, p.tensor, g) for p, g in zip(problems, given)]), problems, given
    ):
        with telling(shape):
            assert_close(y, *answer(p, **g), p.k, dtype=jnp.float32, contract=True)


@with_kernels
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
def test_one_call_has_all(platform, x):
    """Where the table says so: the parts are operands of the call, and nothing else is left to do."""
    n, k = 64, 256
    w = QuantizedTensor(packed=spec(n, k // 8, dtype="uint32"), scale=spec(n, 2, dtype=x), bits=4)
    needed = {"norm", "bias", "activation", "residual"}
    fused = any(needed <= kernel.operands for kernel in backends[platform].find(4, x))
    for rows in (1, 2, 8, 16, 17, 64):
        args = [spec(*shape, dtype=x) for shape in ((rows, k), (k,), (n,), (rows, n // 2))]

        def f(x, norm, bias, residual, w):
            return gemv(x, w, norm=norm, bias=bias, residual=residual, activation="swiglu")

        text = lowered(platform, f, *args, w)
        (call,) = calls(text)
        inside = fused and rows <= backends[platform].fused_rows
        assert ("norm" in call and "residual" in call and 'activation = "swiglu"' in call) == inside
        assert ("stablehlo.rsqrt" in text) != inside


@pytest.mark.parametrize("x", ["float32", "bfloat16"])
def test_special_values(backend, x, rng):
    """NaN goes through relu; a bad index gives NaN through every activation; -inf becomes no NaN in relu."""
    case = Case(4, 32, 256, 128, "zero")
    problems = [make(rng, 4, x, case, exact=True) for _ in range(3)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    values = problems[0].x.copy()
    values[1, 3] = np.nan
    ids = np.array([0, 1, 3, 2], np.int32)
    infinite = np.full((4, 32), -np.inf, values.dtype)

    @jax.jit
    def f(x, w, bias):
        chosen = [gemv(x, w, index=ids, activation=a, implementation=backend) for a in ACTIVATIONS]
        one = jax.tree.map(lambda a: a[0], w)
        return chosen, gemv(x, one, bias=bias[0], activation="relu", implementation=backend)

    chosen, low = f(values, w, infinite)
    for activation, y in zip(ACTIVATIONS, chosen):
        with telling(activation):
            np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, True, False])
            np.testing.assert_array_equal(np.isnan(y).any(-1), [False, True, True, False])
    products = [np.asarray(values[i], np.float64) @ problems[ids[i]].weight().T for i in (0, 3)]
    expected = np.maximum(np.stack(products), 0).astype(values.dtype)
    np.testing.assert_array_equal(chosen[0][jnp.array([0, 3])], expected)
    np.testing.assert_array_equal(low[jnp.array([0, 2, 3])], 0)
    assert np.isnan(low[1]).all()


@pytest.mark.parametrize("x", ["float32", "bfloat16", "float16"])
def test_residual_in_the_place_of_the_result(backend, x, rng):
    """Donated, exact overlap: of whole arrays, and of slices, with as many rows as every backend fuses."""
    p = make(rng, 4, x, Case(8, 256, 256, 64, "zero"), exact=True)

    @partial(jax.jit, donate_argnums=0)
    def part(r, x, w):
        return r.at[:2].set(gemv(x[:2], w, residual=r[:2], implementation=backend))

    @partial(jax.jit, donate_argnums=0)
    def all_of_it(r, x, w):
        return gemv(x, w, residual=r, implementation=backend)

    @partial(jax.jit, donate_argnums=0)
    def of_x(x, w):
        return x.at[:2].set(gemv(x[:2], w, residual=x[:2], implementation=backend))

    r = rng.integers(-2, 3, (8, 256)).astype(p.x.dtype)
    sums = (p.answer() + np.asarray(r, np.float64)).astype(p.x.dtype)
    same = (p.answer() + np.asarray(p.x, np.float64)).astype(p.x.dtype)
    fresh = lambda a: jnp.asarray(a) + 0  # noqa: E731  in memory that is XLA's to give away
    np.testing.assert_array_equal(all_of_it(fresh(r), p.x, p.tensor), sums)
    np.testing.assert_array_equal(part(fresh(r), p.x, p.tensor), np.concatenate([sums[:2], r[2:]]))
    if backend == "cuda":  # kernels read x while others write; docs/kernels.md
        with pytest.raises(jax.errors.JaxRuntimeError, match="x and the result share memory"):
            jax.block_until_ready(of_x(fresh(p.x), p.tensor))
    else:
        np.testing.assert_array_equal(of_x(fresh(p.x), p.tensor), np.concatenate([same[:2], p.x[2:]]))


@by_name(k for k in SOME if "one_byte_scale" in k.operands)
def test_one_byte_scale(kernel, rng):
    """In groups, by row and for all."""
    cases = must_take(kernel)
    if kernel.name == "stream":  # which has other scales of integers in 16 or 32 bits
        cases = [case for case in cases if isinstance(case.group, str) and case.k * kernel.bits % 128 == 0]
    if kernel.name == "wgmma_any":  # which has no room for float32 zeros of groups of 16
        cases = [case for case in cases if case.group != 16]
    dtypes = [jnp.float8_e4m3fn, jnp.float8_e8m0fnu] * len(cases)
    problems = [
        make(rng, kernel.bits, kernel.x, case, scale_dtype=dtype) for case, dtype in zip(cases[:6], dtypes)
    ]
    ys = products([(p.x, p.tensor, p.bias) for p in problems], kernel.backend)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for case, y, p in zip(cases, ys, problems):
        with telling((case, p.scale.dtype)):
            more = 0.0 if kernel.name not in ROUNDING else 2 * rounded(p.x, p.weight(), p.x.dtype)
            assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, more=more)


@by_name([k for k in SOME if k.name == "stream" and k.bits == 4 and k.x != "float32"])
def test_residual_of_many_rows_in_place(kernel, rng):
    """A row of the weight that two tiles have, or two CTAs, is added to y once."""
    for n in (1990, 2064):
        p = make(rng, 4, kernel.x, Case(16, n, 256, 128, "zero"), exact=True)
        r = rng.integers(-2, 3, (16, n)).astype(p.x.dtype)

        @partial(jax.jit, donate_argnums=0)
        def f(r, x, w):
            return gemv(x, w, residual=r, implementation="cuda")

        expected = (p.answer() + np.asarray(r, np.float64)).astype(p.x.dtype)
        with telling(n):
            np.testing.assert_array_equal(f(jnp.asarray(r) + 0, p.x, p.tensor), expected)
            assert_ran(kernel)
