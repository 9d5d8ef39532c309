"""More than 64 rows of x where no kernel takes them: the weight in x's own dtype, and a matmul; see _many_rows.py.

On a GPU, say. A CPU runs the same in float32, so that here it is made to do as others do.
"""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import on
from problems import Case, make
from test_lowering import built, calls, lowered, spec, weight
from tolerance import assert_close, rounded

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, _dispatch, _ffi, _many_rows, gemv, reference

XLA = {"implementation": "xla"}
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
FLOATS = pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])


@pytest.fixture(params=["xla", pytest.param("cuda", marks=pytest.mark.cuda)])
def elsewhere(request, monkeypatch):
    """Programs as for a platform that is no CPU, all by XLA; or on a GPU with weights of 16 bits by our kernel. What is
    given to gemv for that. None of these may be kept for other tests, nor theirs for these."""
    product = _many_rows.product
    jax.clear_caches()
    if request.param == "xla":
        monkeypatch.setattr(_many_rows, "product", lambda o, s, platform: product(o, s, platform=None))
        yield XLA
    else:
        monkeypatch.setattr(_dispatch, "_capability", lambda: 0)  # no kernel that rounds weights
        always = _dispatch.backends["cuda"]._replace(dequantizes=lambda _, x: x != "float32")
        monkeypatch.setitem(_dispatch.backends, "cuda", always)
        with on("cuda"), jax.default_matmul_precision("highest"):
            yield {}
            if request.node.callspec.params.get("x") != "float32":
                assert _ffi.last_kernel("cuda") == "dequantize"
    jax.clear_caches()


def check(y, p):
    """Against float64. Codes are exact, sums and scales float32, and a weight of 16 bits is rounded once."""
    dtype = p.x.dtype
    more = 0.0 if dtype == np.float32 else rounded(p.x, p.weight(), dtype)
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32, more=more)


CASES = [
    Case(65, 40, 256, 64, "zero", bias=True),
    Case(70, 100, 1032, 36, "fraction"),  # groups that end anywhere
    Case(128, 33, 200, 40, "offset", scale="float32"),
    Case(512, 24, 130, 64, "mid", bytes=True),  # the last group is short, and so is the last word
    Case(65, 17, 96, "row", "integer", scale="bfloat16"),
    Case(90, 9, 77, "tensor", "fraction"),
    Case(65, 1, 1, "row", "mid"),
]


@pytest.mark.parametrize(
    ("bits", "x"),
    [*((bits, "bfloat16") for bits in range(1, 9)), (3, "float16"), (4, "float16"), (4, "float32")],
)
def test_values(elsewhere, bits, x, rng):
    problems = [make(rng, bits, x, case) for case in CASES]

    @jax.jit
    def products(args):
        return [gemv(x, w, bias=b, out_dtype="float32", **elsewhere) for x, w, b in args]

    for y, p in zip(products([(p.x, p.tensor, p.bias) for p in problems]), problems):
        check(y, p)


@pytest.mark.parametrize(
    ("format", "bits", "x"),
    [
        ("codebook", 4, "bfloat16"),
        ("codebook", 3, "float16"),
        ("float8_e4m3fn", 8, "bfloat16"),
        ("float8_e5m2", 8, "float32"),
    ],
)
def test_formats(elsewhere, format, bits, x, rng):
    cases = [
        Case(65, 40, 256, 16, bias=True, scale="float8_e4m3fn"),
        Case(70, 100, 1031, 36),  # groups that end anywhere, and float8 rows that are no whole words
        Case(128, 33, 200, 40, scale="float32"),
        Case(90, 9, 77, "tensor"),
        Case(512, 24, 130, 64, scale="float8_e8m0fnu"),
    ]
    problems = [make(rng, bits, x, case, format=format) for case in cases]

    @jax.jit
    def products(args):
        return [gemv(x, w, bias=b, out_dtype="float32", **elsewhere) for x, w, b in args]

    for y, p in zip(products([(p.x, p.tensor, p.bias) for p in problems]), problems):
        check(y, p)


@FLOATS
@pytest.mark.parametrize("shape", [(), (24,)], ids=str)
@pytest.mark.parametrize(
    ("bits", "format", "shift"), [(4, "codebook", "mid"), (3, "affine", "zero"), (8, "affine", "offset")]
)
def test_global_scale(elsewhere, bits, format, shift, shape, x, rng):
    """It is part of the weight, rounded once with it; of a stack each entry has its own."""
    scale = rng.uniform(0.01, 0.1, (3, *shape)).astype(np.float32)
    case = Case(70, 24, 160, 16, shift, bias=True, scale="float8_e4m3fn")
    problems = [make(rng, bits, x, case, format=format) for _ in scale]
    wholes = [dataclasses.replace(p.tensor, global_scale=by) for p, by in zip(problems, scale)]
    stack = jax.tree.map(lambda *a: np.stack(a), *wholes)
    p, w = problems[0], wholes[0]
    one = gemv(p.x, w, bias=p.bias, out_dtype="float32", **elsewhere)
    each = gemv(np.stack([p.x, p.x]), stack, index=np.array([2, 1]), out_dtype="float32", **elsewhere)
    for y, i, bias in (one, 0, p.bias), (each[0], 2, None), (each[1], 1, None):
        q = problems[i]
        by = np.reshape(scale[i].astype(np.float64), (-1, 1))
        offset = None if q.offset is None else q.offset.astype(np.float64) * by
        by = q.scale.astype(np.float64) * by
        check(y, dataclasses.replace(q, x=p.x, scale=by, offset=offset, bias=bias))


@FLOATS
def test_gradient(elsewhere, x, rng):
    """Of x: the cotangent is what meets the weight, in its own dtype."""
    p = make(rng, 4, x, Case(130, 150, 96, 32, "zero"))
    ct = rng.standard_normal((130, 150)).astype(p.x.dtype)
    y = jax.vjp(lambda x: gemv(x, p.tensor, **elsewhere), jnp.asarray(p.x))[1](jnp.asarray(ct))[0]
    more = 0.0 if x == "float32" else rounded(ct, p.weight().T, p.x.dtype)
    exact, size = np.asarray(ct, np.float64), np.abs(np.asarray(ct, np.float64))
    assert_close(y, exact @ p.weight(), size @ p.weight_magnitude(), 150, dtype=p.x.dtype, more=more)


@FLOATS
def test_norm(elsewhere, x, rng):
    """x of 16 bits stays what it is: normalised, it is rounded as the weight is."""
    p = make(rng, 4, x, Case(80, 24, 128, 32, "zero"))
    norm = rng.uniform(0.5, 1.5, 128).astype(p.x.dtype)
    wide = np.asarray(p.x, np.float64)
    h = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm, np.float64)
    y = gemv(p.x, p.tensor, norm=norm, out_dtype="float32", **elsewhere)
    more = 0.0 if x == "float32" else 2 * rounded(h, p.weight(), p.x.dtype)
    # The norm is a sum of K squares, a root, and three products: as many roundings again.
    size = np.abs(h) @ p.weight_magnitude().T
    assert_close(y, h @ p.weight().T, size, p.k, dtype=jnp.float32, factor=2, more=more)


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("ids", [1, [2, 0, 3, -1], [0, 1, 1, 0, 1, 1, 0, 0]], ids=str)
def test_index(elsewhere, ids, x, rng):
    """One entry for all, or one for each slice of 70 rows; slices that share one, and one that is out of range."""
    entries = 2 if np.size(ids) == 8 else 3
    problems = [make(rng, 3, x, Case(70, 20, 96, 32, "zero", bias=True), exact=True) for _ in range(entries)]
    w, bias = jax.tree.map(lambda *a: np.stack(a), *((p.tensor, p.bias) for p in problems))
    xs = rng.integers(-2, 3, (*np.shape(ids), 70, 96)).astype(jnp.dtype(x))
    y = np.asarray(gemv(xs, w, index=np.array(ids), bias=bias, out_dtype="float32", **elsewhere))
    for i, e in np.ndenumerate(ids):
        if not 0 <= e < entries:
            assert np.isnan(y[i]).all()
            continue
        p = problems[e]
        expected = xs[i].astype(np.float64) @ p.weight().T + np.asarray(p.bias, np.float64)
        np.testing.assert_array_equal(y[i], expected)


@pytest.mark.parametrize("x", ["float32"])
def test_vmap(elsewhere, x, rng):
    """Over x: few rows each, many of one matrix. Over weights: each meets its own."""
    # jaxlib 0.8 has no batched product of bfloat16 on a CPU.
    p = make(rng, 6, x, Case(96, 20, 64, 32, "offset"), exact=True)
    product = jax.vmap(lambda x, w: gemv(x, w, out_dtype="float32", **elsewhere), (0, None))
    np.testing.assert_array_equal(product(p.x.reshape(8, 12, 64), p.tensor).reshape(96, 20), p.answer())
    ws = jax.tree.map(lambda a: np.stack([a, a[::-1]]), p.tensor)
    y = jax.vmap(product, (None, 0))(p.x.reshape(8, 12, 64), ws).reshape(2, 96, 20)
    np.testing.assert_array_equal(y, [p.answer(), p.answer()[:, ::-1]])


@pytest.mark.parametrize("elsewhere", ["xla"], indirect=True)
def test_codebook(elsewhere, rng):
    codebook = np.array([-1, -0.5, 0.25, 1], np.float32)
    p = make(rng, 2, "bfloat16", Case(70, 6, 64, 16), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=p.scale, codebook=codebook, bits=2)
    expected = p.x.astype(np.float64) @ np.asarray(w.dequantize(jnp.float32), np.float64).T
    np.testing.assert_array_equal(gemv(p.x, w, out_dtype="float32", **elsewhere), expected)


# What is asked of the compiler.


@built
def test_rounding_kernel(monkeypatch):
    """On Hopper a kernel rounds weights as the matmul does, where they are many: up to 128 to 2048 rows of x, which a
    norm may have made float32, by their number; of float32 ones where TF32 is what `jnp.dot` would have."""
    monkeypatch.setattr(_dispatch, "_capability", lambda: 9)

    def rounds(rows=65, n=8192, x="bfloat16", w=None, **options):
        w = w or QuantizedTensor(packed=spec(n, 256, dtype="uint32"), scale=spec(n, dtype="float32"), bits=4)
        jax.clear_caches()  # of what was lowered for another GPU
        text = lowered("cuda", lambda x, w: gemv(x, w, **options), spec(rows, 2048, dtype=x), w)
        return [("rounded = true" in line, f"x2048x{SHORT[x]}>" in line) for line in calls(text)]

    assert rounds() == rounds(2048, x="float32") == rounds(2048, x="float16") == [(True, True)]
    assert rounds(256, n=1536) == rounds(512, n=1024, x="float32") == [(True, True)]
    assert rounds(768, n=4864) == rounds(512, n=5760) == [(True, True)]
    assert rounds(769, n=4864) == rounds(513, n=5760) == []
    assert rounds(64) == [(False, True)]
    assert rounds(2049) == rounds(257, n=1536) == rounds(2049, x="float32") == []
    assert rounds(513, n=1024, x="float32") == []
    assert rounds(n=1528) == rounds(n=1016, x="float32") == []
    assert rounds(norm=jnp.ones(2048)) == [(True, True)]
    # No kernel of them takes groups that are not whole 16.
    w = QuantizedTensor(packed=spec(8192, 256, dtype="uint32"), scale=spec(8192, 256), bits=4)
    assert rounds(x="float32", w=w) == rounds(w=w) == []
    # `direct` rounds none, and is for small ones.
    assert rounds(73, n=1000) == rounds(256, n=256) == [(True, True)]
    assert rounds(74, n=1000) == rounds(257, n=256) == rounds(65, n=256, x="float32") == []

    def coded(bits=4, groups=64, n=8192):
        table, scale = spec(1 << bits, dtype="float32"), spec(n, groups)
        packed = spec(n, 64 * bits, dtype="uint32")
        return QuantizedTensor(packed=packed, scale=scale, codebook=table, bits=bits)

    assert rounds(1024, w=coded()) == rounds(512, x="float32", w=coded()) == [(True, True)]
    assert rounds(256, w=coded(n=7680)) == rounds(128, w=coded(n=7679)) == [(True, True)]
    assert rounds(1025, w=coded()) == rounds(257, w=coded(n=7680)) == rounds(129, w=coded(n=7679)) == []
    assert rounds(513, x="float32", w=coded()) == []

    def scaled(dtype, groups, n=4096):
        """mxfp4 or nvfp4."""
        scale, packed = spec(n, groups, dtype=f"float8_{dtype}"), spec(n, 256, dtype="uint32")
        factor = spec(dtype="float32") if dtype == "e4m3fn" else None
        return QuantizedTensor(
            packed=packed, scale=scale, codebook=spec(16, dtype="float32"), global_scale=factor, bits=4
        )

    for w in scaled("e8m0fnu", 64), scaled("e4m3fn", 128):
        assert rounds(512, n=4096, w=w) == [(True, True)]
        assert rounds(513, n=4096, w=w) == rounds(513, n=4096, x="float32", w=w) == []
    for scale in spec(8192), spec(8192, 64):  # of fp8, of mxfp8
        float8 = QuantizedTensor(packed=spec(8192, 2048, dtype="float8_e4m3fn"), scale=scale)
        assert rounds(2048, w=float8) == [(True, True)]
        assert rounds(2049, w=float8) == []
    assert rounds(w=coded(groups=128)) == rounds(w=coded(bits=8)) == []
    for precision, expected in ("tensorfloat32", [(True, True)]), ("highest", []), ("BF16_BF16_F32_X3", []):
        with jax.default_matmul_precision(precision):
            assert rounds(x="float32") == expected
    with jax.default_matmul_precision("highest"):
        assert rounds(x="float32", implementation="cuda") == [(False, True)]
        assert rounds() == [(True, True)]
    monkeypatch.setattr(_dispatch, "_capability", lambda: 8)
    assert rounds() == []


def dots(rows, platform="tpu", x="float32", f=gemv, **options) -> list[str]:
    text = lowered(platform, lambda x, w: f(x, w, **options), spec(rows, 256, dtype=x), weight())
    return [line for line in text.splitlines() if "dot_general" in line]


@pytest.mark.parametrize("asked", [None, "tensorfloat32", "highest", "BF16_BF16_F32_X3"])
def test_default_matmul_precision(asked):
    """As of `jnp.dot`, from more than 64 rows on: where the product is called, and not where it is compiled."""

    def at(x, w):
        with jax.default_matmul_precision(asked):
            return gemv(x, w)

    def of_jnp(x, w):
        with jax.default_matmul_precision(asked):
            return jnp.dot(x, jnp.zeros((256, 48), jnp.float32))

    def gradient(x, w):
        return jax.grad(lambda x: at(x, w).sum())(x)

    def asks(lines):
        return [line.split("precision = ")[1].split(" : ")[0].split("}")[0] for line in lines]

    expected = asks(dots(65, f=of_jnp))
    assert asks(dots(65, f=at)) == expected
    assert asks(dots(65, f=gradient)) == expected
    assert ("HIGHEST" in expected[0]) == (asked == "highest")
    assert "HIGHEST" in asks(dots(64, f=at))[0]


def test_reference_keeps_to_float32():
    """It is the oracle, for any number of rows."""
    for x in ("bfloat16", "float32"):
        (dot,) = dots(512, x=x, f=reference.gemv)
        assert "HIGHEST" in dot
        assert "bf16" not in dot


@pytest.mark.parametrize("x", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"out_dtype": "float32"}, {"activation": "silu"}], ids=str
)
def test_16_bits_meet_16_bits(x, implementation, options):
    """And give float32, where it goes on in that; what is only rounded to x's dtype is written in it at once."""
    options = options | ({"bias": jnp.zeros(48, x)} if "bias" in options else {})
    (dot,) = dots(65, x=x, implementation=implementation, **options)
    kind = SHORT[x]
    result = "f32" if options else kind
    assert f"(tensor<65x256x{kind}>, tensor<48x256x{kind}>) -> tensor<65x48x{result}>" in dot


@FLOATS
def test_result_in_its_own_dtype(elsewhere, x, rng):
    p = make(rng, 4, x, Case(66, 24, 256, 64, "zero"))
    more = 0.0 if x == "float32" else rounded(p.x, p.weight(), p.x.dtype)
    y = gemv(p.x, p.tensor, **elsewhere)
    assert y.dtype == p.x.dtype
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=p.x.dtype, more=more)


@built
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_symbolic_rows_may_round(platform):
    """In a program for any number of them a kernel is told that it may where they are many."""
    (m,) = jax.export.symbolic_shape("m")
    w = QuantizedTensor(packed=spec(64, 32, dtype="uint32"), scale=spec(64, 4), bits=4)
    x = jax.ShapeDtypeStruct((m, 256), jnp.bfloat16)
    text = jax.export.export(jax.jit(gemv), platforms=[platform], disabled_checks=EXPORT_CHECKS)(
        x, w
    ).mlir_module()
    assert ["rounded = true" in line for line in calls(text)] == [True]


def test_symbolic_rows_are_exact_where_they_are_few(on_cpu, rng):
    """With all that a program for as many would do, x of integers and a norm around the product too."""
    p = make(rng, 4, "bfloat16", Case(64, 40, 512, 16))  # of weights that are not bfloat16
    act_order = dataclasses.replace(p.tensor, perm=rng.permutation(512).astype(np.int32))
    norm = rng.uniform(0.5, 1, 512).astype(np.float32)
    codes = rng.integers(-127, 128, (64, 512)).astype(np.int8)
    (m,) = jax.export.symbolic_shape("m")
    for x, w, options in [
        (p.x, p.tensor, {}),
        (p.x, act_order, {"norm": norm}),
        (codes, p.tensor, {"x_scale": np.ones((64, 1), np.float32)}),
    ]:
        rows = {name: options.pop(name) for name in ("x_scale",) if name in options}

        def f(x, w, rows, options=options):
            return gemv(x, w, out_dtype="float32", implementation="cpu", **rows, **options)

        spec_of = lambda a: jax.ShapeDtypeStruct((m, *a.shape[1:]), a.dtype)  # noqa: E731
        given = jax.tree.map(spec_of, (x, rows))
        exported = jax.export.export(jax.jit(f), platforms=["cpu"], disabled_checks=EXPORT_CHECKS)
        call = exported(given[0], w, given[1]).call
        for count in (3, 64):
            few = jax.tree.map(lambda a, count=count: a[:count], (x, rows))
            np.testing.assert_array_equal(call(few[0], w, few[1]), jax.jit(f)(few[0], w, few[1]))
        many = jax.tree.map(lambda a: np.resize(a, (256, *a.shape[1:])), (x, rows))
        expected = jax.jit(f)(many[0], w, many[1])
        more = 2.0**-8 * np.abs(expected).max() if options else 0.0  # x * norm may be rounded there
        np.testing.assert_allclose(call(many[0], w, many[1]), expected, rtol=0, atol=more)


@pytest.mark.parametrize("has", [True, False])
def test_gradient_in_bfloat16(has, monkeypatch, rng):
    """Where a CPU multiplies that, and as XLA does: (M, N) @ (N, K)."""
    monkeypatch.setattr(_many_rows, "cpu_has_bfloat16", lambda: has)
    p = make(rng, 4, "bfloat16", Case(65, 24, 64, 32, "zero"))
    f = jax.jit(jax.grad(lambda x: gemv(x, p.tensor).sum()))
    text = f.trace(p.x).lower(lowering_platforms=("cpu",)).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    kind = "bf16" if has else "f32"
    assert f"(tensor<65x24x{kind}>, tensor<24x64x{kind}>)" in product
    assert "contracting_dims = [1] x [0]" in product
