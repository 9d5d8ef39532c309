"""The whole of `gemv` at random: every format, scale, part, index and number of rows against float64."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import FLOATS, FORMATS, on
from parts import ACTIVATIONS, EPS, GATED, answer, normalised
from problems import Case, Problem, make
from random_examples import few
from tolerance import assert_close, held, rounded

from jaxgemv import gemv

ONE_BYTE = ["float8_e4m3fn", "float8_e8m0fnu"]
some = st.integers  # (least, most)
shapes = st.one_of(
    st.tuples(some(1, 70), some(1, 300), st.one_of(some(1, 310), st.sampled_from(["row", "tensor"]))),
    st.tuples(  # of which fast kernels take many
        st.one_of(some(1, 40), some(250, 300), some(510, 530)),
        some(1, 40).map(lambda blocks: 64 * blocks),
        st.sampled_from([16, 32, 64, 128, 256, "row", "tensor"]),
    ),
)
rows = st.one_of(some(1, 4), some(5, 16), some(17, 64), some(65, 140))


class Call(NamedTuple):
    """entries: of a stack, 0 for none; ids: one for all rows, or one each."""

    case: Case
    bits: int
    scale: str | None
    global_scale: str
    parts: str
    activation: str | None
    permuted: bool
    entries: int
    ids: int | tuple[int, ...]


@st.composite
def calls(draw, format: str) -> Call:
    n, k, group = draw(shapes)
    m = draw(rows)
    activation = draw(st.sampled_from([None, None, *ACTIVATIONS]))
    entries = draw(st.sampled_from([0, 0, 0, 1, 3]))
    each = entries and m <= 12 and draw(st.booleans())
    id_ = some(-1, entries)  # also none of the stack
    n += n % 2 * (activation in GATED)
    return Call(
        case=Case(m, n, k, group, draw(st.sampled_from(FORMS)), bytes=draw(st.booleans())),
        bits=draw(st.one_of(some(1, 8), st.just(4))) if format in ("affine", "codebook") else 8,
        scale=draw(st.sampled_from([None, *FLOATS, *ONE_BYTE])),
        global_scale=draw(st.sampled_from(["", "one", "row"])),
        parts=" ".join(draw(st.sets(st.sampled_from(["norm", "bias", "residual"])))),
        activation=activation,
        permuted=draw(st.sampled_from([False, False, False, True])),
        entries=entries,
        ids=tuple(draw(st.lists(id_, min_size=m, max_size=m))) if each else draw(id_),
    )


FORMS = ["mid", "zero", "fraction", "integer", "offset"]


def stacked(entries: list):
    """Leaves one behind the other; of one entry alone what it is."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *entries)


def scaled(a, factor):
    """A parameter times the global scale, float64."""
    if a is None or factor is None:
        return a
    return a.astype(np.float64) * (factor.reshape(-1, *(1,) * (a.ndim - 1)) if factor.ndim else factor)


def expected(p: Problem, activation, norm, bias, residual):
    """(the result, its magnitude, what may be lost besides), float64"""
    exact, magnitude = answer(p, activation, norm, bias, residual)
    sums, size = answer(p, None, norm, bias)
    h, weight, lost = normalised(p.x, norm), p.weight(), np.zeros_like(sums)
    if len(h) > 64:
        lost += 2 * rounded(h, weight, p.x.dtype)
        # A normalised x that is no normal number of 16 bits.
        lost += np.abs(weight).sum(-1) * float(jnp.finfo(p.x.dtype).smallest_subnormal)
    elif p.codebook is not None and p.x.dtype.itemsize == 2:
        lost += held(h, np.broadcast_to(p.wide_scale(), weight.shape), p.codebook)
    if activation in GATED:
        gate, up = np.split(np.abs(sums), 2, -1)
        of_gate, of_up = np.split(lost, 2, -1)
        both = np.prod(np.split(size * 2.0**-20 + lost, 2, -1), axis=0)
        lost = 1.2 * (of_gate * up + of_up * gate + both)
    return exact, magnitude, lost if activation in (None, *GATED) else 1.2 * lost


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="module")
def platform(request):
    with on(request.param):
        yield request.param


@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("format", FORMATS)
@few
@given(st.data())
def test_gemv(platform, format, x, data):
    call, seed = data.draw(calls(format)), data.draw(some(0, 2**32 - 1))
    rng, (m, n, k, *_) = np.random.default_rng(seed), call.case
    problems = [
        make(rng, call.bits, x, call.case, scale_dtype=call.scale, format=format)
        for _ in range(call.entries or 1)
    ]
    shape = {"": None, "one": (), "row": (n,)}[call.global_scale]
    factors = [None if shape is None else rng.uniform(0.5, 1.5, shape).astype(np.float32) for _ in problems]
    perms = [rng.permutation(k).astype(np.int32) if call.permuted else None for _ in problems]
    ws = [
        dataclasses.replace(p.tensor, global_scale=factor, perm=perm)
        for p, factor, perm in zip(problems, factors, perms)
    ]
    dtype, out = problems[0].x.dtype, n // 2 if call.activation in GATED else n
    small = k**0.5 * 2**call.bits  # enough for a gated result to be a float16
    xs = (problems[0].x.astype(np.float32) / small).astype(dtype)
    parts = {"norm": (k,), "bias": (n,), "residual": (m, out)}
    parts = {a: rng.standard_normal(shape).astype(dtype) for a, shape in parts.items() if a in call.parts}
    if "norm" in parts:
        parts["norm"] = (parts["norm"].astype(np.float32) / small).astype(dtype)
    if "bias" in parts and call.entries:  # a row an entry
        parts["bias"] = np.stack([parts["bias"]] * call.entries)
    y = gemv(
        xs,
        stacked(ws) if call.entries else ws[0],
        index=np.array(call.ids) if call.entries else None,
        eps=EPS,
        activation=call.activation,
        **parts,
    )
    assert y.shape == (m, out)
    alone = isinstance(call.ids, int) or not call.entries
    for i in [slice(0, m)] if alone else [slice(i, i + 1) for i in range(m)]:
        entry = 0 if not call.entries else call.ids if alone else call.ids[i.start]
        if call.entries and not 0 <= entry < call.entries:
            assert np.isnan(np.asarray(y[i], np.float32)).all()
            continue
        given = {a: parts.get(a) for a in ("norm", "bias", "residual")}
        if "bias" in parts and call.entries:
            given["bias"] = parts["bias"][entry]
        if "residual" in parts:
            given["residual"] = parts["residual"][i]
        perm = np.arange(k) if perms[entry] is None else perms[entry]
        if "norm" in parts:
            given["norm"] = parts["norm"][perm]
        p, by = problems[entry], factors[entry]
        p = dataclasses.replace(
            p, x=xs[i][:, perm], scale=scaled(p.scale, by), offset=scaled(p.offset, by), bias=None
        )
        with np.errstate(over="ignore"):  # of exp, whose reciprocal is 0 then
            exact, magnitude, lost = expected(p, call.activation, **given)
        assert_close(y[i], exact, magnitude, k, dtype=dtype, factor=2, worst=True, more=lost)
