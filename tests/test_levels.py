"""The CPU's kernels in each instruction set: rows, groups, each way in which x may be taken, and who falls back.

Each kernel by its name is in test_kernels.py and test_fused.py.
"""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import FLOATS, ISAS, ROUNDING, products
from problems import Case, Problem, make
from test_kernels import telling
from tolerance import assert_close, rounded

from jaxgemv import QuantizedTensor, codebooks, gemv, gemv_int4
from jaxgemv._ffi import TARGET, backends, cpu_isa, last_kernel, set_cpu_isa, use_only


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


def check(isa: str, problems: dict[object, Problem]) -> None:
    """Each against float64, all in one program; what tells them apart is in the message."""
    ys = products([(p.x, p.tensor, p.bias) for p in problems.values()], "cpu", isa)
    for (what, p), y in zip(problems.items(), ys):
        more = 0.0
        if isa == "amx" and p.x.dtype == jnp.bfloat16 and len(p.x) > 64:
            more = rounded(p.x, p.weight(), p.x.dtype)
        with telling(what):
            assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, more=more)


def check_one(p: Problem) -> None:
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation="cpu")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32)


def with_element(p: Problem, i: int, value: float) -> Problem:
    """In the last row of x."""
    values = p.x.copy()
    values[-1, i] = value
    return dataclasses.replace(p, x=values)


# Which kernel


def has(name, format="affine"):
    return any((kernel.name, kernel.format) == (name, format) for kernel in backends["cpu"].kernels)


def test_chosen(isa, rng):
    """By rows of x, and by whether groups suit."""
    panel = "bf16_panel" if has("bf16_panel") else "f32_panel"
    dot = "bf16_dot" if has("bf16_dot") else "int8_dot"
    for m, group, expected in [
        (1, 128, dot),
        (2, 128, dot),
        (3, 128, "amx_int8" if isa == "amx" else panel),
        (4, 128, "amx_bf16" if isa == "amx" else panel),
        (9, 32, "amx_panel" if isa == "amx" else panel),
        (12, 128, "amx_bf16" if isa == "amx" else panel),
        (65, 128, "amx_panel" if isa == "amx" else panel),
        (1, 7, "f32_panel"),
    ]:
        if expected == "int8_dot" and not has(expected):
            expected = "f32_panel"
        check(isa, {(m, group): make(rng, 4, "bfloat16", Case(m, 512, 512, group))})
        assert last_kernel("cpu") == expected, (m, group)


def test_chosen_for_tables(isa, rng):
    """Of entries that are bfloat16 pairs are faster, where a processor has them and rows are few."""
    if not has("bf16_dot", "codebook"):
        pytest.skip(f"{isa} has no bf16_dot")
    panel = "f32_panel" if isa == "amx" else "bf16_panel"
    for m, table, expected in [
        (1, codebooks.E2M1, "bf16_dot"),
        (2, codebooks.E2M1, "bf16_dot"),
        (3, codebooks.E2M1, panel),
        (5, codebooks.E2M1, panel),
        (1, codebooks.NF4, "f32_dot"),
        (3, codebooks.NF4, "f32_panel"),
    ]:
        p = make(rng, 4, "bfloat16", Case(m, 512, 512, 128), format="codebook")
        check(isa, {m: dataclasses.replace(p, codebook=table)})
        assert last_kernel("cpu") == expected, m


@pytest.mark.parametrize(("bits", "format"), [(4, "codebook"), (8, "codebook"), (8, "float8_e4m3fn")])
@pytest.mark.parametrize("scale", [None, "float8_e8m0fnu"])
def test_last_group_is_shorter(isa, bits, format, scale, rng):
    """Groups of 32, which kernels know, and rows that end inside one."""
    cases = [Case(m, 40, k, 32, scale=scale) for m in (1, 2, 5) for k in (40, 48, 72, 80, 112, 1000, 1072)]
    for x in ("float32", "bfloat16"):
        check(isa, {(x, case.m, case.k): make(rng, bits, x, case, format=format) for case in cases})


# What none of these takes: width, x, case.
REFUSED = {
    "int8_dot": [
        (1, "float32", Case(1, 40, 512, 16)),  # less than the codes of a lane
        (4, "float32", Case(3, 40, 512)),
    ],
    "amx_bf16": [
        (4, "float32", Case(12, 40, 512, 128)),
        (3, "bfloat16", Case(12, 40, 512, 128)),
    ],
    "amx_panel": [
        (4, "float16", Case(12, 40, 512, 128)),
        (4, "bfloat16", Case(12, 40, 190, 128)),  # float32 sums of so few lose less than weights of two parts
    ],
    "bf16_weights": [
        (4, "float16", Case(70, 40, 512, 128)),
        (4, "bfloat16", Case(64, 40, 512, 16)),  # may not be rounded
    ],
    "bf16_dot": [
        (4, "float16", Case(1, 40, 512, 128)),
        (4, "bfloat16", Case(1, 40, 512, 96)),  # blocks have 128 codes
        (3, "bfloat16", Case(1, 40, 512, 128)),
        (4, "bfloat16", Case(3, 48, 512, 128)),
    ],
    "bf16_panel": [
        (4, "float16", Case(12, 40, 512, 128)),
        (4, "bfloat16", Case(12, 40, 512, 16)),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_only_kernel_cannot(isa, name, rng):
    """An error, and not another kernel."""
    if not has(name):
        pytest.skip(f"{isa} has no {name}")
    with only(name):
        for bits, x, case in REFUSED[name]:
            with pytest.raises(
                jax.errors.JaxRuntimeError, match="no cpu kernel that may run takes this call"
            ):
                check_one(make(rng, bits, x, case))


def test_the_only_kernel_cannot_take_these_values(isa, rng):
    """An error where it is alone, and f32_panel where it is not."""
    if not has("int8_dot"):
        pytest.skip(f"{isa} has no int8_dot")
    p = make(rng, 4, "float32", Case(1, 40, 512))
    p.x[:, 100:120] = 1e-30  # more than are treated alone
    with only("int8_dot"), pytest.raises(Exception, match="does not take these values of x"):
        check_one(p)
    check_one(p)
    assert last_kernel("cpu") == "f32_panel"


@pytest.mark.parametrize("bits", range(1, 9))
def test_small_elements(isa, bits, rng):
    """Few or many, whose weights alone are not zero: nothing hides what is lost of them."""
    if not any(kernel.name == "int8_dot" and kernel.bits == bits for kernel in backends["cpu"].kernels):
        pytest.skip(f"{isa} has no int8_dot for int{bits}")
    n, k = 37, 1100
    for rows, group, small, size, dtype in [
        (1, 1100, 3, 2.0**-14, "float32"),
        (2, 1100, 5, 2.0**-14, "float32"),
        (1, 64, 4, 2.0**-14, "float32"),
        (2, 32, 6, 2.0**-14, "float32"),
        (1, 32, 1000, 2.0**-14, "float32"),
        (2, 128, 1000, 2.0**-14, "float32"),
        (1, 1100, 6, 2.0**-40, "float32"),
        (2, 32, 6, 2.0**-100, "float32"),
        (2, 64, 6, 2.0**-24, "bfloat16"),
        (1, 1100, 6, 2.0**-60, "bfloat16"),
        (2, 1100, 1, 2.0**-22, "float16"),
    ]:
        at = rng.permutation(k)[:small]
        x = rng.uniform(0.5, 1, (rows, k)).astype(dtype)
        x[:, at] = rng.uniform(size / 2, size, (rows, small))
        codes = np.zeros((n, k), np.uint8)
        codes[:, at] = rng.integers(1, 1 << bits, (n, small))
        scale = rng.uniform(0.5, 1, (n, -(-k // group))).astype(np.float32)
        w = QuantizedTensor.from_codes(codes, scale, offset=np.zeros_like(scale), bits=bits, group_size=group)
        with only("int8_dot"):
            y = gemv(x, w, out_dtype="float32", implementation="cpu")
        weight = codes * np.repeat(scale.astype(np.float64), group, 1)[:, :k]
        with telling((rows, group, small, size, dtype)):
            exact = x.astype(np.float64) @ weight.T
            assert_close(y, exact, exact, k, dtype=jnp.float32, contract=True)


@pytest.mark.parametrize("name", ["f32_panel", "bf16_panel", "bf16_dot", "amx_panel"])
def test_long_sums_of_one_sign(isa, name, rng):
    """Nothing cancels, so that what is lost of a long sum shows: 2^-20 of it at most."""
    if not has(name):
        pytest.skip(f"{isa} has no {name}")
    n = 40
    for k, group, rows in [(1100, "row", 3), (1100, 64, 9), (14336, "row", 8), (14336, 128, 17)]:
        rows = min(rows, 2) if name == "bf16_dot" else rows
        p = make(rng, 4, "bfloat16", Case(rows, n, k, group, "offset", scale="float32"))
        x = np.abs(p.x) + p.x.dtype.type(0.5)
        p = dataclasses.replace(p, x=x, scale=np.abs(p.scale), offset=np.abs(p.offset))
        with only(name):
            y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")
        # Both parts of a weight are that near to it, all those of a row that have one code to the same side.
        more = 2.0**-18 * p.magnitude() if name == "amx_panel" else 0.0
        with telling((k, group, rows)):
            assert_close(y, p.answer(), p.magnitude(), k, dtype=jnp.float32, contract=True, more=more)


@pytest.mark.parametrize("rows", [1, 12, 33, 64])
def test_weights_that_are_bfloat16(isa, rows, rng):
    """nvfp4's, entries times scales: nothing of them is rounded."""
    if not has("bf16_weights"):
        pytest.skip(f"{isa} has no bf16_weights")
    p = make(rng, 4, "bfloat16", Case(rows, 75, 1100, 16, scale="float8_e4m3fn"), format="codebook")
    p = dataclasses.replace(p, codebook=codebooks.E2M1)
    with only("bf16_weights"):
        check_one(p)
    check_one(p)
    assert (last_kernel("cpu") == "bf16_weights") == (rows >= 12)
    # A long sum in which nothing cancels.
    p = make(rng, 4, "bfloat16", Case(rows, 40, 14336, 16, scale="float8_e4m3fn"), format="codebook")
    p = dataclasses.replace(p, x=np.abs(p.x) + p.x.dtype.type(0.5), codebook=np.abs(codebooks.E2M1))
    with only("bf16_weights"):
        y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, contract=True)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**101, 1e36, 1e-39, 2.0**100, 2.0**-126, 0])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("bf16_panel", Case(9, 40, 1100, 100, "zero")),
        ("bf16_dot", Case(2, 40, 1100, "row", "zero")),
        ("amx_panel", Case(24, 40, 1100, 33, "zero")),
        ("bf16_weights", Case(70, 40, 1100, 16, "zero")),
    ],
)
def test_values_of_pairs(isa, name, case, value, rng):
    """They leave to f32_panel what their instruction does not treat as float32 does."""
    if not has(name):
        pytest.skip(f"{isa} has no {name}")
    p = with_element(make(rng, 4, "bfloat16", case), 777, value)
    y = np.asarray(gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu"))
    fits = value == 0 or 2.0**-126 <= abs(value) <= 2.0**100
    if isa != "amx" or name == "amx_panel":
        assert last_kernel("cpu") == (name if fits else "f32_panel")
    if np.isfinite(value):
        more = rounded(p.x, p.weight(), p.x.dtype) if name in ROUNDING else 0.0
        assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, more=more)
        return
    with np.errstate(invalid="ignore"):
        exact = p.x.astype(np.float64)[-1] @ p.weight().T
    np.testing.assert_array_equal(y[-1], exact)
    assert np.isfinite(y[:-1]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**-60, 2.0**-50, 0])
@pytest.mark.parametrize("of", ["scale", "offset"])
@pytest.mark.parametrize(("name", "rows", "group"), [("amx_panel", 24, 33), ("bf16_weights", 70, 16)])
def test_values_of_parameters(isa, name, rows, group, of, value, rng):
    """A weight that is finished is normal numbers, or f32_panel's."""
    if not has(name):
        pytest.skip(f"{isa} has no {name}")
    p = make(rng, 4, "bfloat16", Case(rows, 70, 1100, group, "offset", scale="float32"))
    getattr(p, of)[69, 33] = value
    with np.errstate(invalid="ignore"):
        y, exact = np.asarray(gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")), p.answer()
        magnitude = p.magnitude()
    assert last_kernel("cpu") == (name if value in (0, 2.0**-50) else "f32_panel")
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(y[~finite], exact[~finite])
    more = rounded(p.x, p.weight()[:69], p.x.dtype) if name in ROUNDING else 0.0
    assert_close(y[:, :69], exact[:, :69], magnitude[:, :69], p.k, dtype=jnp.float32, more=more)
    assert np.isfinite(value) == finite[:, 69].all()


@pytest.mark.parametrize("rows", [17, 65])
def test_infinite_weights(isa, rows, rng):
    """Of float8_e5m2, with x of zero and without: no part of a weight makes NaN of one."""
    p = make(rng, 8, "bfloat16", Case(rows, 40, 500, 20), format="float8_e5m2")
    p.packed[3, 499], p.packed[5, 7] = np.inf, -np.inf
    p.x[1, 499] = 0
    with np.errstate(invalid="ignore"):
        y, exact = np.asarray(gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")), p.answer()
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(y[~finite], exact[~finite])
    assert not finite[:, [3, 5]].any()
    assert finite.sum() == 38 * rows


# Rows, groups, values of x


# Tiles of columns hold 16: from one that is half empty to several that are not whole.
@pytest.mark.parametrize("x", FLOATS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_rows(isa, bits, x, rng):
    rows = (2, 3, 5, 8, 12, 17, 33, 65, 513)
    check(isa, {m: make(rng, bits, x, Case(m, 75, 1100, 128, "zero", bias=True)) for m in rows})


@pytest.mark.parametrize("x", FLOATS)
def test_rows_packed_in_parts(isa, x, rng):
    """More of x than is packed at a time: each part finds its own rows of residual and y, and the one index."""
    m, n, k = 300, 40, 8192
    problems = [make(rng, 4, x, Case(m, n, k, 128, "zero", bias=True), exact=True) for _ in range(2)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    p, bias = problems[1], np.stack([p.bias for p in problems])
    residual = rng.integers(-9, 9, (m, n)).astype(np.float32)
    call = partial(gemv, out_dtype="float32", implementation="cpu")
    y = call(p.x, w, bias=bias, index=np.int32(1), residual=residual)
    np.testing.assert_array_equal(y, p.answer() + residual)
    in_place = jax.jit(lambda r, x, w: call(x, w, residual=r), donate_argnums=0)
    y = in_place(jnp.asarray(residual), p.x, p.tensor)
    np.testing.assert_array_equal(y, p.answer() - np.asarray(p.bias, float) + residual)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_groups(isa, bits, rng):
    """Whole blocks of codes, parts of them, and neither."""
    groups = (16, 24, 32, 96, 192, 384, 1000, "row")
    cases = [Case(m, 70, 2100, group, "offset") for m in (1, 16) for group in groups]
    check(isa, {case: make(rng, bits, "float32", case) for case in cases})


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("m", [1, 8, 24])
def test_elements_too_different_for_integers(isa, m, x, rng):
    """In one row of many, that one of several threads arranges."""
    p = make(rng, 4, x, Case(m, 64, 8192, 128, "zero"))
    check(isa, {extreme: with_element(p, 5000, extreme) for extreme in (1e-30, 1e-12, 1e5, 1e30)})


@pytest.mark.parametrize("m", [1, 8, 24])
def test_small_and_large_x(isa, m, rng):
    p = make(rng, 4, "float32", Case(m, 40, 1024, 128, "mid"))
    scales = (1e-25, 1e-19, 1.0, 1e19, 1e25)
    check(isa, {by: dataclasses.replace(p, x=(p.x * by).astype(np.float32)) for by in scales})


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
