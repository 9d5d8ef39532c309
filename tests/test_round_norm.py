"""A norm whose result may be rounded to x's dtype before it meets the weight: by default it is not (test_fused.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import ROUNDED_NORM, KernelParam, assert_ran, by_name, kernels, most_rows, set_loop_rows
from parts import EPS, answer, normalised, operands
from problems import Case, Problem, make
from test_fused import ROWS
from test_kernels import of_rounding, telling
from test_lowering import calls, lowered, spec, with_kernels
from tolerance import assert_close, rounded

from jaxgemv import QuantizedTensor, _dispatch, gemv, reference

ALL = "norm bias residual"
SOME = [
    k
    for k in kernels(transposed=False)
    if k.bits in (2, 4, 5) and (k.name in ROUNDED_NORM or ("norm" in k.operands and k.backend == "cuda"))
]


def of_norm(p: Problem, norm) -> np.ndarray:
    """How far results may move where what is normalised is rounded to x's dtype once: (..., N)."""
    return rounded(p.weight(), normalised(p.x, norm), p.x.dtype).T


@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
def test_any_rows(backend, x, rng):
    """As near as what is rounded once allows, and with float32 x as near as ever."""
    problems = [make(rng, b, x, Case(m, 64, 1024, 128, "zero")) for m in (1, 3, 8, 17, 70) for b in (2, 4)]
    given = [operands(rng, p, ALL, None, x) for p in problems]

    @jax.jit
    def f(args):
        return [gemv(x, w, round_norm=True, eps=EPS, implementation=backend, **g) for x, w, g in args]

    for y, p, g in zip(f([(p.x, p.tensor, g) for p, g in zip(problems, given)]), problems, given):
        more = of_norm(p, g["norm"]) if x != "float32" or len(p.x) > 64 else 0.0
        more = more + (rounded(normalised(p.x, g["norm"]), p.weight(), x) if len(p.x) > 64 else 0.0)
        with telling((p.x.shape, p.bits)):
            assert_close(y, *answer(p, **g), p.k, dtype=p.x.dtype, more=more)


@by_name(SOME)
def test_inside(kernel: KernelParam, monkeypatch, rng):
    """By kernels that take a norm, also where one around them is faster; of a CPU's by those that take no other."""
    monkeypatch.setattr(_dispatch, "_are_inside", lambda *_: True)
    first, last = ROWS.get((kernel.name, kernel.format)) or ROWS.get(kernel.name, (1, 64))
    last = most_rows(kernel) or last
    rows = [m for m in (1, 2, 3, 9, 16, 33, 64, 70) if first <= m <= last]
    cases = [Case(m, 96, 1024, *weight) for m in rows for weight in ((128, "zero"), ("row", "offset"))]
    cases += [Case(rows[-1], 96, 16640, "row", "mid")]  # which several CTAs look at
    problems = [make(rng, kernel.bits, kernel.x, case) for case in cases]
    given = [operands(rng, p, ALL, None, kernel.x) for p in problems]

    @jax.jit
    def f(args):
        return [gemv(x, w, round_norm=True, eps=EPS, implementation=kernel.backend, **g) for x, w, g in args]

    ys = f([(p.x, p.tensor, g) for p, g in zip(problems, given)])
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for y, p, g in zip(ys, problems, given):
        more = of_rounding(kernel, p) + (of_norm(p, g["norm"]) if kernel.x != "float32" else 0.0)
        with telling((len(p.x), p.k, p.scale.ndim)):
            assert_close(y, *answer(p, **g), p.k, dtype=p.x.dtype, more=more)


def test_reference_rounds(rng):
    """As a model that norms x by itself; float32 has nothing to round."""
    for x in ("bfloat16", "float16", "float32"):
        p = make(rng, 4, x, Case(5, 24, 256, 64, "zero"))
        norm = operands(rng, p, "norm", None, x)["norm"]
        by_itself = reference.gemv(normalised(p.x, norm).astype(x), p.tensor, out_dtype="float32")
        near, exact = (
            reference.gemv(p.x, p.tensor, norm=norm, eps=EPS, round_norm=r, out_dtype="float32")
            for r in (True, False)
        )
        if x == "float32":
            np.testing.assert_array_equal(near, exact)
        else:  # but for the few numbers that a last bit before rounds the other way
            assert np.linalg.norm(near - by_itself) <= 0.3 * np.linalg.norm(exact - by_itself)


def test_gradients(backend, rng):
    """Of x and norm, as of the rounded product: what rounding does has no slope."""
    p = make(rng, 4, "bfloat16", Case(8, 24, 256, 64, "zero"))
    norm = operands(rng, p, "norm", None, "bfloat16")["norm"]
    cotangent = rng.standard_normal((8, 24)).astype(np.float32)

    def loss(x, norm, round_norm):
        y = gemv(x, p.tensor, norm=norm, round_norm=round_norm, out_dtype="float32", implementation=backend)
        return jnp.sum(y * cotangent)

    for of in (0, 1):
        exact, near = (
            np.asarray(jax.grad(loss, of)(jnp.asarray(p.x), jnp.asarray(norm), round_norm), np.float64)
            for round_norm in (False, True)
        )
        assert np.linalg.norm(near - exact) <= 0.02 * np.linalg.norm(exact) > 0


@with_kernels
def test_where_it_is_inside(platform, monkeypatch):
    """With few rows always; with several XLA norms x, in x's dtype, unless the weight is large (on a GPU)."""
    set_loop_rows(monkeypatch, "cuda", 0)
    w = QuantizedTensor(packed=spec(64, 32, dtype="uint32"), scale=spec(64, 2), bits=4)
    for rows in (1, 2, 3, 16):
        text = lowered(
            platform, lambda x, n, w: gemv(x, w, norm=n, round_norm=True), spec(rows, 256), spec(256), w
        )
        (call,) = calls(text)
        inside = "stablehlo.rsqrt" not in text
        assert inside or "xbf16>" in call
        assert ("round_norm = true" in call) == inside == (platform == "cpu" or rows <= 2)
