"""int8 x by every kernel that takes it: sums of integers are exact, and scales come behind them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import assert_ran, by_name, kernels
from problems import Case, Problem, make, unpack_bits
from test_kernels import telling
from tolerance import assert_close

from jaxgemv import QuantizedTensor, gemv
from jaxgemv._ffi import TARGET

pytestmark = [pytest.mark.kernels, pytest.mark.numerics]

ROWS = kernels(transposed=False, xs=["int8"])


def cases_of(name: str, bits: int) -> list[Case]:
    """Groups of any length, and for few rows whole blocks, whole lanes, and blocks that several rows share."""
    if name == "int8_dot":
        block, lane = (64, 4) if 8 % bits else (512 // bits, 32 // bits)
        return [
            Case(1, 40, 1280, block, "integer", bias=True),
            Case(2, 67, 2 * block + lane, 2 * block, "offset"),
            Case(1, 33, 1100, "row", "mid", bytes=True),
            Case(2, 24, 999, lane, "fraction", scale="float16"),
            Case(1, 5, 1, "tensor", "integer"),
        ]
    least = 12 if name.startswith("amx") else 1
    return [
        Case(least, 40, 1280, 128, "integer", bias=True),
        Case(17, 67, 1100, 192, "offset"),
        Case(33, 24, 999, "row", "mid", bytes=True),
        Case(65, 33, 512, 128, "fraction", scale="float16"),
        *([] if name.startswith("amx") else [Case(3, 6, 77, 5, "integer"), Case(1, 1, 1, "tensor", "mid")]),
    ]


@cache
def problems_of(name: str, bits: int) -> list[tuple[Case, Problem]]:
    rng = np.random.default_rng(20251)
    return [(case, make(rng, bits, "int8", case)) for case in cases_of(name, bits)]


def of_integers(p: Problem) -> QuantizedTensor:
    """The weight without its scale."""
    zero = p.zero if p.zero is not None and p.zero.dtype == np.int32 else None
    group = p.group if zero is not None and p.k % p.group else None
    return QuantizedTensor(
        packed=p.packed, scale=None, zero=zero, bits=p.bits, group_size=group, k=p.tensor.k
    )


def exact(p: Problem) -> np.ndarray:
    zero = of_integers(p).zero
    q = unpack_bits(p.packed, p.bits, p.k).astype(np.int64)
    shift = 1 << p.bits - 1 if zero is None else p._wide(zero).astype(np.int64)
    return p.x.astype(np.int64) @ (q - shift).T


@partial(jax.jit, static_argnames="backend")
def products(args, backend: str):
    return [gemv(x, w, bias=bias, implementation=backend) for x, w, bias in args]


@by_name(ROWS)
def test_values(kernel):
    problems = problems_of(kernel.name, kernel.bits)
    integers = [] if kernel.name.startswith("amx") else problems
    args = [(p.x, p.tensor, p.bias) for _, p in problems] + [(p.x, of_integers(p), None) for _, p in integers]
    ys = products(args, kernel.backend)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for (case, p), y in zip(problems, ys):
        with telling(case):
            assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32)
    for (case, p), y in zip(integers, ys[len(problems) :]):
        with telling(case):
            assert y.dtype == jnp.int32
            np.testing.assert_array_equal(y, exact(p))


@jax.jit
def with_scales(args):
    """The calls themselves, of x with its scales."""

    def call(x, x_scale, w):
        given = {"x": x, "packed": w.packed, "scale": w.scale, "zero": w.zero, "x_scale": x_scale}
        y = jax.ShapeDtypeStruct((1, x.shape[0], w.packed.shape[0]), jnp.float32)
        f = jax.ffi.ffi_call(TARGET, y)
        attributes = {"bits": np.int64(w.bits), "group": np.int64(x.shape[1] // w.scale.shape[1])}
        arrays = [a[None] for a in given.values()]
        return f(*arrays, operands=",".join(given), transposed=False, **attributes)[0]

    return [call(*each) for each in args]


@by_name(k for k in ROWS if k.bits in (3, 4, 8))
def test_x_scale(kernel, rng):
    """One a row, one a group that is smaller, larger or the same as the weight's."""
    m = {"int8_dot": 2}.get(kernel.name, 13)
    args, answers = [], []
    for groups, x_groups in ((4, 1), (2, 8), (8, 2), (16, 16)):
        if kernel.name.startswith("amx") and x_groups > 8:
            continue
        p = make(rng, kernel.bits, "int8", Case(m, 40, 512, 512 // groups, "zero"))
        x_scale = rng.uniform(0.5, 1.5, (m, x_groups)).astype(np.float32)
        x = p.x * np.repeat(np.asarray(x_scale, np.float64), 512 // x_groups, axis=1)
        args.append((p.x, x_scale, p.tensor))
        answers.append((x @ p.weight().T, np.abs(x) @ p.weight_magnitude().T))
    ys = with_scales(args)
    jax.block_until_ready(ys)
    assert_ran(kernel)
    for y, (answer, magnitude) in zip(ys, answers):
        assert_close(y, answer, magnitude, 512, dtype=jnp.float32)


@by_name(k for k in ROWS if k.bits in (4, 8) and not k.name.startswith("amx"))
def test_index(kernel, rng):
    """int32 has no NaN: the least integer stands for an index out of range."""
    stack = [make(rng, kernel.bits, "int8", Case(2, 19, 256, "row", "integer")) for _ in range(3)]
    w = jax.tree.map(lambda *a: np.stack(a), *(of_integers(p) for p in stack))
    x = rng.integers(-128, 128, (3, 2, 256)).astype(np.int8)
    y = gemv(x, w, index=np.array([2, 3, 0], np.int32), implementation=kernel.backend)
    jax.block_until_ready(y)
    assert_ran(kernel)
    for i, entry in ((0, 2), (2, 0)):
        codes = unpack_bits(stack[entry].packed, kernel.bits, 256).astype(np.int64)
        np.testing.assert_array_equal(y[i], x[i].astype(np.int64) @ (codes - stack[entry].zero[:, None]).T)
    assert (y[1] == np.iinfo(np.int32).min).all()
