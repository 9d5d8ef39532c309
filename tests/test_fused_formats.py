"""norm, bias, activation, residual and global_scale by every kernel of tables and of float8 that takes them."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import KernelParam, assert_ran, by_name, holds_entries, kernels
from parts import EPS, answer, normalised, operands
from problems import FLOAT8, Case, Problem, make
from test_fused import variants_of, whole
from test_kernels import telling
from tolerance import assert_close, held

from jaxgemv import QuantizedTensor, gemv
from jaxgemv.codebooks import E2M1, NF4

pytestmark = pytest.mark.kernels

E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn
N, K = 42, 640
# A table or None for float8; codes that share a scale; its dtype, None for x's; the shape of a global scale.
FORMATS = {
    "nf4": (NF4, 64, None, None),
    "table of 32": (E2M1 / 2, 32, None, ()),
    "table by row": (E2M1, "row", "float32", (N,)),
    "mxfp4": (E2M1, 32, E8M0, None),
    "nvfp4": (E2M1, 16, E4M3, ()),
    "nvfp4 of two": (E2M1, 16, E4M3, (N,)),
    "float8 by row": (None, "row", "float32", (N,)),
    "float8 of 64": (None, 64, None, ()),
    "mxfp8": (None, 32, E8M0, None),
}
SOME = [
    k
    for k in kernels(transposed=False, formats=("codebook", *FLOAT8))
    if "activation" in k.operands and k.bits in (4, 8) and not (k.format == "codebook" and k.bits == 8)
]


def takes(kernel: KernelParam, format: str) -> bool:
    book, group, scale, _ = FORMATS[format]
    if (book is None) != (kernel.format in FLOAT8):
        return False
    if kernel.name in ("amx_bf16", "bf16_panel") and group == 16:
        return False
    if kernel.name in ("bf16_dot", "bf16_panel") and book is NF4:  # whose entries are no bfloat16
        return False
    if kernel.name == "bf16_weights":  # up to 64 rows weights that are bfloat16 as they are
        return scale in (E8M0, E4M3)
    return kernel.name != "wgmma_tma" or group != 16 or scale is E4M3


def has_parts(kernel: KernelParam, format: str, variant: tuple) -> bool:
    """Whether a kernel, or XLA around it, has them: stream has some for few rows, and for tables of groups alone."""
    rows, parts, _ = variant
    book, group, scale, factor = FORMATS[format]
    alone = 8 if factor is not None else 2  # rows up to which parts without a norm are inside
    if kernel.name != "stream" or (rows > alone and "norm" not in parts):
        return True
    if book is not None and group == "row":
        return False
    return rows <= (2 if "norm" not in parts and book is not None and scale is None else 8)


@cache
def problem(format: str, kind: str, x: str, rows: int, parts: str, activation: str | None):
    """(the problem, its weight, the parts, the answer and its magnitude, the error of a table's entries)"""
    rng = np.random.default_rng(20251)
    book, group, scale, shape = FORMATS[format]
    bits = 8 if book is None else 4
    p: Problem = make(rng, bits, x, Case(rows, N, K, group), scale_dtype=scale, format=kind)
    if book is not None:
        p = dataclasses.replace(p, codebook=book.astype(np.float32))
    w: QuantizedTensor = p.tensor
    by = 1
    if shape is None:  # sums where activations bend
        p = dataclasses.replace(p, x=(p.x.astype(np.float32) / 8).astype(p.x.dtype))
    else:
        factor = (rng.uniform(0.5, 1.5, shape) / 8).astype(np.float32)
        w = dataclasses.replace(w, global_scale=factor)
        by = factor.astype(np.float64).reshape(-1, *(1,) * (p.scale.ndim - 1))
    given = operands(rng, p, parts, activation, x)
    wide = dataclasses.replace(p, scale=p.scale.astype(np.float64) * by)
    exact, magnitude = answer(wide, activation, **given)
    h = normalised(p.x, given.get("norm"))
    scales = np.broadcast_to(wide.wide_scale(), (N, K))
    return p, w, given, exact, magnitude, 0.0 if book is None else held(h, scales, p.codebook)


@by_name(SOME)
def test_parts(kernel):
    """In float32, and rounded once at the end."""
    formats = [format for format in FORMATS if takes(kernel, format)]
    asked = [(f, v) for f in formats for v in variants_of(kernel) if has_parts(kernel, f, v)]
    # Entries held to 2^-14, which a gated activation would multiply.
    loose = {format for format in formats if holds_entries(kernel) and FORMATS[format][0] is NF4}
    asked = [(f, v) for f, v in asked if f not in loose or v[2] not in ("swiglu", "geglu")]
    problems = [problem(format, kernel.format, kernel.x, *variant) for format, variant in asked]
    args = [(p.x, w, given) for p, w, given, *_ in problems]
    name = kernel.name if kernel.backend == "cuda" else ""
    ys = whole(args, tuple(activation for _, (*_, activation) in asked), kernel.backend, name)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for (format, variant), y, (p, _, _, exact, magnitude, held_to) in zip(asked, ys, problems):
        with telling((format, variant)):
            more = 1.2 * held_to if format in loose else 0.0
            assert_close(y, exact, magnitude, K, dtype=p.x.dtype, worst=True, more=more)


@pytest.mark.parametrize("shape", [(3,), (3, N)])
def test_entry_of_a_stack(backend, shape, rng):
    """Of an index that is a number, of one by row, and of one that is none of the stack."""
    case = Case(3, N, K, 16)
    problems = [make(rng, 4, "bfloat16", case, scale_dtype=E4M3, format="codebook") for _ in range(3)]
    problems = [dataclasses.replace(p, codebook=E2M1) for p in problems]
    factors = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    stack = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    stack = dataclasses.replace(stack, global_scale=factors)
    given = operands(rng, problems[0], "norm residual", None, "bfloat16")
    ids = np.array([2, 0, 3], np.int32)

    @jax.jit
    def f(x, w):
        return [gemv(x, w, index=i, eps=EPS, implementation=backend, **given) for i in (1, ids)]

    def expected(i, x, residual):
        by = factors[i].astype(np.float64).reshape(-1, 1)
        p = dataclasses.replace(problems[i], x=x, scale=problems[i].scale.astype(np.float64) * by)
        return answer(p, None, norm=given["norm"], residual=residual)

    one, each = f(problems[0].x, stack)
    assert_close(one, *expected(1, problems[0].x, given["residual"]), K, dtype=jnp.bfloat16, worst=True)
    for row, i in enumerate(ids[:2]):
        at = slice(row, row + 1)
        right = expected(i, problems[0].x[at], given["residual"][at])
        assert_close(each[at], *right, K, dtype=jnp.bfloat16, worst=True)
    assert np.isnan(each[2]).all()
