"""Every mistake is a Python exception while tracing, and says operation, argument, expected, got."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemv
from jaxgemv import QuantizedTensor, gemv, gemv_int4, quantize_activations, reference
from jaxgemv._ffi import TARGET

f32, i32, i8, u8, u32 = jnp.float32, jnp.int32, jnp.int8, jnp.uint8, jnp.uint32


def a(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, WQ, ZERO, SCALE = a(2, 64), a(6, 8, dtype=u32), a(6, 4), a(6, 4)
W = QuantizedTensor(packed=WQ, scale=SCALE, zero=ZERO, bits=4)
STACK = QuantizedTensor(packed=a(3, 6, 8, dtype=u32), scale=a(3, 6, 4), zero=a(3, 6, 4), bits=4)
PARAMETER = "float16, bfloat16 or float32"


def tensor(**fields):
    return QuantizedTensor(**{"packed": WQ, "scale": SCALE, "bits": 4} | fields)


def check(error, text, f, *args, **kwargs):
    """Raised by abstract evaluation: nothing has run by then. Fields of `kwargs` are no arrays."""
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda *args: f(*args, **kwargs), *args)
    assert str(raised.value).splitlines()[0] == text  # JAX may add lines about its traceback


INT4 = (
    # x
    (
        TypeError,
        "x must be one of float16, bfloat16, float32, int8; got int32",
        (a(64, dtype=i32), WQ, ZERO, SCALE),
    ),
    (ValueError, "x must have shape (..., K) with K >= 1; got ()", (a(), WQ, ZERO, SCALE)),
    (ValueError, "x must have shape (..., K) with K >= 1; got (3, 0)", (a(3, 0), WQ, ZERO, SCALE)),
    # Wq
    (
        ValueError,
        "Wq must have shape (N, 512) for x with K = 4096; got (6, 500)",
        (a(4096), a(6, 500, dtype=u32), None, a()),
    ),
    (ValueError, "Wq must have shape (N, 9) for x with K = 65; got (6, 8)", (a(65), WQ, ZERO, SCALE)),
    (
        ValueError,
        "Wq must have shape (N, 32) for x with K = 64; got (6, 8)",
        (X, a(6, 8, dtype=u8), ZERO, SCALE),
    ),
    (ValueError, "Wq must have shape (..., N, words); got (8,)", (X, a(8, dtype=u32), ZERO, SCALE)),
    (ValueError, "Wq must have at least one row; got (0, 8)", (X, a(0, 8, dtype=u32), None, a())),
    (TypeError, "Wq must be uint32, or uint8 with the same bytes; got float32", (X, a(6, 8), ZERO, SCALE)),
    (
        TypeError,
        "Wq must be uint32, or uint8 with the same bytes; pack codes with jaxgemv.pack; got int32",
        (X, a(6, 8, dtype=i32), ZERO, SCALE),
    ),
    (
        TypeError,
        "Wq must be uint32, or uint8 with the same bytes; pack codes with jaxgemv.pack; got int4",
        (X, a(6, 64, dtype=jnp.int4), ZERO, SCALE),
    ),
    (TypeError, "Wq must be an array; got None", (X, None, ZERO, SCALE)),
    (
        ValueError,
        "Wq must have shape (N, ...), or be a stack with index= or under jax.vmap; got (3, 6, 8)",
        (X, a(3, 6, 8, dtype=u32), None, a(3)),
    ),
    # scale and zero
    (
        TypeError,
        f"scale must be {PARAMETER}; got int32 (zero and scale may be swapped)",
        (X, WQ, SCALE, a(6, 4, dtype=i32)),
    ),
    (TypeError, "scale must be an array for x of dtype float32; got None", (X, WQ, ZERO, None)),
    (
        TypeError,
        "zero must be float16, bfloat16, float32 or an integer dtype; got bool",
        (X, WQ, a(6, dtype=bool), SCALE),
    ),
    (ValueError, "scale must have shape (), (6,) or (6, G); got (4, 6)", (X, WQ, None, a(4, 6))),
    (ValueError, "scale must have shape (), (6,) or (6, G); got (6, 0)", (X, WQ, None, a(6, 0))),
    (ValueError, "zero must have shape (), (6,) or (6, G); got (5,)", (X, WQ, a(5), SCALE)),
    (
        ValueError,
        "scale, zero and offset must have the same number of groups; got {'scale': 4, 'zero': 2}",
        (X, WQ, a(6, 2), SCALE),
    ),
    (ValueError, "scale has 5 groups, which do not divide K = 64: give group_size=", (X, WQ, None, a(6, 5))),
    (
        TypeError,
        "zero must be an integer array when scale is None; got float32",
        (a(64, dtype=i8), WQ, ZERO, None),
    ),
)


@pytest.mark.parametrize(("error", "text", "args"), INT4, ids=[text[:40] for _, text, _ in INT4])
def test_gemv_int4(error, text, args):
    check(error, "gemv_int4: " + text, gemv_int4, *args)


OPTIONS = (
    (ValueError, "group_size must be a positive integer or None; got 0", {"group_size": 0}),
    (ValueError, "group_size must be a positive integer or None; got 16.0", {"group_size": 16.0}),
    (ValueError, "group_size must be a positive integer or None; got True", {"group_size": True}),
    (ValueError, "scale must have 2 groups for K = 64 and group_size = 32; got 4", {"group_size": 32}),
    (TypeError, "bias must be float16, bfloat16 or float32; got int32", {"bias": np.zeros(6, np.int32)}),
    (ValueError, "bias must have shape (6,); got (5,)", {"bias": np.zeros(5, np.float32)}),
    (TypeError, "out_dtype must be one of float16, bfloat16, float32; got int32", {"out_dtype": "int32"}),
    (TypeError, "out_dtype must be a dtype or the name of one; got 'bf16'", {"out_dtype": "bf16"}),
    (ValueError, "implementation must be None, 'cuda', 'cpu' or 'xla'; got 'gpu'", {"implementation": "gpu"}),
)


@pytest.mark.parametrize(("error", "text", "options"), OPTIONS, ids=[text[:40] for _, text, _ in OPTIONS])
def test_options(error, text, options):
    check(error, "gemv_int4: " + text, gemv_int4, X, WQ, ZERO, SCALE, **options)


TENSORS = (
    (ValueError, "bits must be an integer from 1 to 8; got 9", {"bits": 9}),
    (ValueError, "bits must be an integer from 1 to 8; got 4.0", {"bits": 4.0}),
    (ValueError, "w.packed must have shape (N, 6) for x with K = 64; got (6, 8)", {"bits": 3}),
    (ValueError, "zero and offset exclude each other; got both", {"zero": ZERO, "offset": ZERO}),
    (ValueError, "codebook excludes zero and offset", {"zero": ZERO, "codebook": a(16)}),
    (ValueError, "codebook must have shape (16,); got (8,)", {"codebook": a(8)}),
    (TypeError, "codebook must be float16, bfloat16 or float32; got int8", {"codebook": a(16, dtype=i8)}),
    (TypeError, f"w.offset must be {PARAMETER}; got int32", {"offset": a(6, dtype=i32)}),
    (ValueError, "w.offset must have shape (), (6,) or (6, G); got (7,)", {"offset": a(7)}),
    (ValueError, "w.scale has 3 groups, which do not divide K = 64: give group_size=", {"scale": a(6, 3)}),
    (ValueError, "x must have shape (..., 60) for w of shape (6, 60); got (2, 64)", {"k": 60}),
)


@pytest.mark.parametrize(("error", "text", "fields"), TENSORS, ids=[text[:40] for _, text, _ in TENSORS])
@pytest.mark.parametrize("f", [gemv, reference.gemv])
def test_gemv(f, error, text, fields):
    check(error, "gemv: " + text, f, X, tensor(**fields))


INDEX = (
    (
        ValueError,
        "w.packed must have shape (N, ...), or be a stack with index= or under jax.vmap; got (3, 6, 8)",
        STACK,
        None,
    ),
    (ValueError, "with index, w.packed must have one stack dimension, (S, N, ...); got (6, 8)", W, 0),
    (TypeError, "index must be int32; got float32", STACK, 0.0),
    (TypeError, "index must be int32; got bool", STACK, np.zeros(2, bool)),
    (
        ValueError,
        "index must be a scalar or have the leading dimensions of x, (2,); got (3,)",
        STACK,
        np.zeros(3, np.int32),
    ),
    (
        ValueError,
        "index must be a scalar or have the leading dimensions of x, (2,); got (2, 64)",
        STACK,
        np.zeros((2, 64), np.int32),
    ),
    (
        ValueError,
        "index must be a scalar or have the leading dimensions of x, (2,); got (1, 2)",
        STACK,
        np.zeros((1, 2), np.int32),
    ),
)


@pytest.mark.parametrize(("error", "text", "w", "index"), INDEX, ids=[text[:40] for _, text, *_ in INDEX])
def test_index(error, text, w, index):
    check(error, "gemv: " + text, gemv, X, w, index=index)


def test_index_texts_of_parameters():
    """With a stack the shapes that are named have its dimension too."""
    wrong = QuantizedTensor(packed=STACK.packed, scale=a(6, 4), bits=4)
    check(
        ValueError,
        "gemv: w.scale must have shape (3,), (3, 6) or (3, 6, G); got (6, 4)",
        gemv,
        X,
        wrong,
        index=0,
    )
    bias = np.zeros((2, 6), np.float32)
    check(
        ValueError,
        "gemv: bias must have shape (6,) or (3, 6); got (2, 6)",
        gemv,
        X,
        STACK,
        index=0,
        bias=bias,
    )


def test_integer_products():
    x, w = a(64, dtype=i8), tensor(scale=None)
    check(TypeError, "gemv: out_dtype must be one of int32; got float32", gemv, x, w, out_dtype=f32)
    bias = np.zeros(6, np.float32)
    check(ValueError, "gemv: offset, codebook and bias need scale; got scale=None", gemv, x, w, bias=bias)
    check(TypeError, "gemv: scale must be an array for x of dtype float32; got None", gemv, X, w)


def test_integer_products_of_float8():
    w = QuantizedTensor(packed=a(6, 64, dtype=jnp.float8_e4m3fn), scale=None)
    text = "gemv: scale must be an array for weights of float8_e4m3fn; got None"
    check(TypeError, text, gemv, a(64, dtype=i8), w)


@pytest.mark.parametrize("k", [0, -1, 64.0, True, "64"])
def test_k(k):
    w = tensor(k=k)
    check(ValueError, f"gemv: w.k must be a positive integer; got {k!r}", gemv, X, w)
    check(ValueError, f"QuantizedTensor: k must be a positive integer; got {k!r}", jaxgemv.dequantize, w)


X8, X_SCALES = a(2, 64, dtype=i8), "x_scale must have shape () or (2, G) with G a divisor of K = 64"

INT8_X = (
    (TypeError, "x must be int8 for x_scale; got float32", {"x": X, "x_scale": np.float32(1)}),
    (TypeError, "x_scale must be float32; got float16", {"x_scale": np.zeros((2, 1), np.float16)}),
    (ValueError, f"{X_SCALES}; got (2,)", {"x_scale": np.zeros((2,), np.float32)}),
    (ValueError, f"{X_SCALES}; got (2, 3)", {"x_scale": np.zeros((2, 3), np.float32)}),
    (ValueError, f"{X_SCALES}; got (2, 0)", {"x_scale": np.zeros((2, 0), np.float32)}),
    (ValueError, f"{X_SCALES}; got (1, 1)", {"x_scale": np.zeros((1, 1), np.float32)}),
    (
        TypeError,
        "x must be float16, bfloat16 or float32 for norm; got int8",
        {"norm": np.zeros(64, np.float32)},
    ),
    (TypeError, "out_dtype must be one of float16, bfloat16, float32; got int32", {"out_dtype": "int32"}),
    (
        ValueError,
        "activation, residual, x_scale and global_scale need scale; got scale=None",
        {"w": tensor(scale=None), "x_scale": np.float32(1)},
    ),
    (
        ValueError,
        "activation, residual, x_scale and global_scale need scale; got scale=None",
        {"w": tensor(scale=None), "activation": "relu"},
    ),
    (
        TypeError,
        "x must be one of float16, bfloat16, float32; got int8",
        {"w": a(6, 64), "x_scale": np.float32(1)},
    ),
)


@pytest.mark.parametrize(("error", "text", "given"), INT8_X, ids=[text[:40] for _, text, _ in INT8_X])
@pytest.mark.parametrize("f", [gemv, reference.gemv])
def test_int8_x(f, error, text, given):
    given = {"x": X8, "w": W} | given
    check(error, "gemv: " + text, f, given.pop("x"), given.pop("w"), **given)


FLOAT8 = (
    (ValueError, "zero must be None for weights of float8_e4m3fn; got an array", {"zero": ZERO}),
    (ValueError, "codebook must be None for weights of float8_e4m3fn; got an array", {"codebook": a(256)}),
    (ValueError, "w.packed must have shape (N, 64) for x with K = 64; got (6, 60)", {"k": 60}),
)


@pytest.mark.parametrize(("error", "text", "given"), FLOAT8, ids=[text[:40] for _, text, _ in FLOAT8])
def test_float8(error, text, given):
    given = dict(given)
    packed = a(6, given.pop("k", 64), dtype=jnp.float8_e4m3fn)
    check(error, "gemv: " + text, gemv, X, QuantizedTensor(packed=packed, scale=SCALE, **given))


def test_quantize_activations():
    op = "quantize_activations: "
    check(TypeError, op + "x must be one of float16, bfloat16, float32; got int8", quantize_activations, X8)
    check(ValueError, op + "group_size must divide K = 64; got 48", quantize_activations, X, group_size=48)
    text = "group_size must be a positive integer or None; got 0"
    check(ValueError, op + text, quantize_activations, X, group_size=0)


def test_dense():
    check(
        TypeError, "gemv: w must be a QuantizedTensor or a float array; got int8", gemv, X, a(6, 64, dtype=i8)
    )
    check(ValueError, "gemv: w must have shape (N, 64) for x with K = 64; got (64, 6)", gemv, X, a(64, 6))
    check(
        TypeError,
        "gemv: x must be one of float16, bfloat16, float32; got int8",
        gemv,
        a(64, dtype=i8),
        a(6, 64),
    )
    with pytest.raises(TypeError, match=re.escape("gemv: w must be an array; got dict")):
        gemv(jnp.zeros(64), {})
    with pytest.raises(NotImplementedError, match="the cpu backend has no kernel for dense weights"):
        gemv(jnp.zeros(64), jnp.zeros((6, 64)), implementation="cpu")


def test_every_function_names_itself():
    for bits in range(1, 9):
        function = getattr(jaxgemv, f"gemv_int{bits}")
        check(
            ValueError,
            f"gemv_int{bits}: x must have shape (..., K) with K >= 1; got ()",
            function,
            a(),
            WQ,
            ZERO,
            SCALE,
        )


def test_under_transformations():
    """The same text from inside jit, vmap and grad, where shapes are those of one entry."""
    text = re.escape("gemv_int4: Wq must have shape (N, 8) for x with K = 63; got (6, 7)")
    x, wq = jnp.zeros((5, 63)), jnp.zeros((6, 7), u32)
    for f in (
        jax.jit(gemv_int4),
        jax.vmap(gemv_int4, (0, None, None, None)),
        jax.grad(lambda *v: gemv_int4(*v).sum()),
    ):
        with pytest.raises(ValueError, match=text):
            f(x, wq, jnp.zeros(6), jnp.zeros(6))


def test_export_without_the_checks():
    """JAX's own words, with our target in them: the promise that EXPORT_CHECKS stands for is for us to make."""
    f = jax.jit(lambda x, w: gemv_int4(x, w, None, 1.0))
    text = f"(?s)compatibility guarantees.*@{TARGET}"
    with pytest.raises(ValueError, match=text):
        jax.export.export(f, platforms=("cpu",))(X, WQ)
    jax.export.export(f, platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)(X, WQ)


def test_x_of_another_width():
    """Within the last word too; words alone are as many codes as x has."""
    w = jaxgemv.quantize(jnp.ones((6, 64)))
    for k in (56, 63, 65):
        with pytest.raises(ValueError, match=r"gemv: (x must have shape \(\.\.\., 64\)|w\.packed must have)"):
            gemv(jnp.ones(k), w)
    assert jaxgemv.gemv_int4(jnp.ones(63), w.packed, w.zero, w.scale).shape == (6,)
