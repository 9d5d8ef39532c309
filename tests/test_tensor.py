"""QuantizedTensor: how it is made, indexed and multiplied by; what goes with it is in test_tensor_parts.py."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, Problem, make, unpack_bits
from tolerance import assert_equal

from jaxgemv import QuantizedTensor, dequantize, gemv, quantize

CASE = Case(3, 6, 48, 16, "zero")
E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


@pytest.fixture
def p(rng):
    return make(rng, 4, "float32", CASE, exact=True)


def codes_of(p: Problem) -> np.ndarray:
    return unpack_bits(p.packed, p.bits, p.k)


# from_codes


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, jnp.uint4])
@pytest.mark.parametrize(("k", "group"), [(48, 16), (45, 16), (45, 48), (45, "row")])
def test_from_codes(k, group, dtype, rng):
    p = make(rng, 4, "float32", Case(3, 6, k, group, "zero"), exact=True)
    size = p.group if isinstance(group, int) else None
    w = QuantizedTensor.from_codes(codes_of(p).astype(dtype), p.scale, zero=p.zero, bits=4, group_size=size)
    assert_equal(w.packed, jnp.asarray(p.packed))
    # The static fields hold only what the arrays cannot tell.
    assert (w.group_size, w.k) == (16 if (k, group) == (45, 16) else 48 if group == 48 else None, w.k)
    assert w.k == (k if k % 8 else None)
    assert w.shape == (6, k)
    np.testing.assert_array_equal(gemv(p.x, w), p.answer())


def test_from_signed_codes(rng):
    """As pack takes them: int8, int4 and int2 hold values around zero."""
    codes = rng.integers(-8, 8, (6, 64)).astype(np.int8)
    w = QuantizedTensor.from_codes(codes, np.float32(0.5), bits=4)
    np.testing.assert_array_equal(w.dequantize(), 0.5 * codes)


def test_from_codes_with_everything(rng):
    codes = rng.integers(0, 16, (2, 6, 64))
    arrays = {
        "codebook": rng.standard_normal((2, 16)).astype(np.float32),
        "global_scale": np.float32([0.5, 2]),
        "perm": np.stack([rng.permutation(64) for _ in range(2)]).astype(np.int32),
    }
    scale = rng.uniform(0.5, 2, (2, 6, 4)).astype(np.float32)
    w = QuantizedTensor.from_codes(codes, scale, **arrays, bits=4)
    weight = np.take_along_axis(arrays["codebook"][:, None], codes, axis=-1) * np.repeat(scale, 16, -1)
    expected = np.empty_like(weight)
    for s in range(2):
        expected[s][:, arrays["perm"][s]] = weight[s] * arrays["global_scale"][s]
    np.testing.assert_allclose(w.dequantize(), expected, rtol=1e-6)
    np.testing.assert_array_equal(w[1].dequantize(), w.dequantize()[1])


FROM_CODES = (
    (TypeError, "pack: codes must be integers; got float32", {"codes": np.zeros((6, 64), np.float32)}),
    (TypeError, "QuantizedTensor.from_codes: codes must be an array; got None", {"codes": None}),
    (
        ValueError,
        "QuantizedTensor.from_codes: codes must have shape (..., N, K); got (64,)",
        {"codes": np.zeros(64, int)},
    ),
    (
        ValueError,
        "pack: 4-bit codes of dtype int64 must lie in [0, 15]; got [16, 16]",
        {"codes": np.full((6, 64), 16)},
    ),
    (
        ValueError,
        "QuantizedTensor.from_codes: scale must have shape (), (6,) or (6, G); got (5,)",
        {"scale": np.ones(5, np.float32)},
    ),
    (
        ValueError,
        "QuantizedTensor.from_codes: bits must be an integer from 1 to 8; got 9",
        {"bits": 9},
    ),
    (
        ValueError,
        "QuantizedTensor.from_codes: scale has 5 groups, which do not divide K = 64: give group_size=",
        {"scale": np.ones((6, 5), np.float32)},
    ),
    (
        ValueError,
        "QuantizedTensor.from_codes: perm must have shape (64,); got (6,)",
        {"perm": np.arange(6)},
    ),
    (
        TypeError,
        "QuantizedTensor.from_codes: perm must be int32; got float32",
        {"perm": np.zeros(64, np.float32)},
    ),
    (
        ValueError,
        "QuantizedTensor.from_codes: global_scale must have shape () or (6,); got (2,)",
        {"global_scale": np.ones(2, np.float32)},
    ),
)


@pytest.mark.parametrize(
    ("error", "text", "change"), FROM_CODES, ids=[text[:60] for _, text, _ in FROM_CODES]
)
def test_from_codes_refuses(error, text, change):
    arguments = {"codes": np.zeros((6, 64), int), "scale": np.ones(6, np.float32), "bits": 4} | change
    with pytest.raises(error, match="^" + re.escape(text) + "$"):
        QuantizedTensor.from_codes(arguments.pop("codes"), arguments.pop("scale"), **arguments)


# w[i]


@pytest.fixture(params=["zero", "codebook"])
def matrix(request, rng):
    p = make(rng, 4, "float32", CASE._replace(form=request.param.replace("codebook", "mid")), exact=True)
    fields = {"global_scale": 2.0 ** rng.integers(-2, 3, 6).astype(np.float32)}
    fields["perm"] = rng.permutation(48).astype(np.int32)
    if request.param == "codebook":
        fields["codebook"] = rng.integers(-8, 8, 16).astype(np.float32)
    return dataclasses.replace(p.tensor, **fields)


ROWS = [
    3,
    -1,
    slice(1, 4),
    slice(None, None, -2),
    np.array([5, 0, 0]),
    [2, 4],
    np.array([[1, 2], [0, -6]]),
    np.int32(2),
]


@pytest.mark.parametrize(
    ("i", "on"),
    [*zip(ROWS, ["numpy", "jax"] * 4), (-1, "jit"), (np.array([[1, 2], [0, -6]]), "jit")],
    ids=str,
)
def test_rows_of_a_matrix(matrix, i, on):
    """An embedding: w[tokens].dequantize() without the rest of the table."""
    expected = np.asarray(matrix.dequantize())[np.asarray(i) if not isinstance(i, slice) else i]
    if on != "numpy":
        matrix = jax.tree.map(jnp.asarray, matrix)
    traced = on == "jit" and not isinstance(i, slice)
    rows = jax.jit(lambda w, i: w[i])(matrix, jnp.asarray(i)) if traced else matrix[i]
    assert rows.shape == expected.shape
    np.testing.assert_array_equal(rows.dequantize(), expected)
    if rows.ndim == 2:
        x = np.ones((2, 48), np.float32)
        np.testing.assert_array_equal(gemv(x, rows), x @ expected.T)


def test_parameters_of_the_whole_matrix(rng):
    """scale (): rows share it, and each row of a stack of rows has it."""
    p = make(rng, 4, "float32", Case(1, 6, 48, "tensor"), exact=True)
    ids = np.array([[1, 2, 3], [0, 5, 5]])
    np.testing.assert_array_equal(p.tensor[ids].dequantize(), p.weight()[ids])
    np.testing.assert_array_equal(p.tensor[2].dequantize(), p.weight()[2])


def test_entries_of_a_stack(rng):
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(4)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    weights = np.stack([p.weight() for p in problems])
    for i in (2, -1, slice(1, 3), np.array([3, 0]), np.array([[1], [2]])):
        np.testing.assert_array_equal(w[i].dequantize(), weights[i])
    x = problems[0].x
    np.testing.assert_array_equal(gemv(x, w[1:3], index=1), x @ weights[2].T)


def test_shapes_alone():
    """ShapeDtypeStructs, as checkpoints are restored into."""
    arrays = {"packed": jnp.uint32, "scale": jnp.float32}
    shapes = {"packed": (5, 6, 8), "scale": (5, 6, 4)}
    w = QuantizedTensor(**{n: jax.ShapeDtypeStruct(shapes[n], d) for n, d in arrays.items()}, bits=4)
    assert w[...] is w
    assert w[1].shape == (6, 64)
    assert w[1:3].shape == (2, 6, 64)
    assert w[1][np.array([0, 2])].shape == (2, 64)


def test_out_of_range(matrix):
    """What can be seen at once is refused, the rest is NaN, and never another row."""
    for bad in (6, -7, np.array([0, 6]), 2**32 + 1, np.int64(2**32)):
        with pytest.raises(IndexError) as raised:
            matrix[bad]
        assert str(raised.value) == f"QuantizedTensor: index must lie in [-6, 6); got {bad}"
    rows = jax.jit(lambda w, i: w[i].dequantize())(matrix, jnp.array([0, 6, -7]))
    assert np.isfinite(rows[0]).all()
    assert np.isnan(rows[1:]).all()


@pytest.mark.parametrize("bad", [None, True, 1.0, (0, 1), "0", np.array([True, False])], ids=str)
def test_index_of_another_type(matrix, bad):
    with pytest.raises(TypeError, match=r"QuantizedTensor: index must be"):
        matrix[bad]


def test_a_row_is_no_matrix(matrix):
    with pytest.raises(
        ValueError, match=re.escape("QuantizedTensor: a single row cannot be indexed; got shape (48,)")
    ):
        matrix[0][0]
    with pytest.raises(
        ValueError, match=re.escape("gemv: w.packed must have shape (..., N, words); got (6,)")
    ):
        gemv(np.ones(48, np.float32), matrix[0])


# x @ w.T


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_matmul(p, as_array):
    y = as_array(p.x) @ p.tensor.T
    assert isinstance(y, jax.Array)
    np.testing.assert_array_equal(y, p.answer())
    np.testing.assert_array_equal(jax.jit(lambda x, w: x @ w.T)(p.x, p.tensor), p.answer())
    assert p.tensor.T.shape == (48, 6)
    assert p.tensor.T.T.shape == (6, 48)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_matmul_the_other_way(p, as_array):
    x, w = as_array(p.x), p.tensor
    for f in (lambda: x @ w, lambda: w @ x, lambda: w.T @ x, lambda: w @ w, lambda: w.T @ w.T):
        with pytest.raises(TypeError, match=r"QuantizedTensor: .* x @ w\.T"):
            f()


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda w: gemv(w, w), "gemv: x must be an array; got QuantizedTensor"),
        (quantize, "quantize: weight must be an array; got QuantizedTensor"),
        (np.asarray, r"QuantizedTensor: .* w\.dequantize\(\) is one"),
        (jnp.asarray, r"QuantizedTensor: .* w\.dequantize\(\) is one"),
        (lambda w: jnp.dot(jnp.ones(48), w), r"QuantizedTensor: .* x @ w\.T"),
        (lambda w: np.asarray(w.T), r"QuantizedTensor: .* w\.dequantize\(\)\.T is an array"),
        (lambda w: jnp.matmul(jnp.ones(48), w.T), r"w\.T, for x @ w\.T alone, of QuantizedTensor\(shape="),
        (lambda w: dequantize(np.ones((6, 48))), "dequantize: w must be a QuantizedTensor; got ndarray"),
        (lambda w: dequantize(w, "bf16"), "dequantize: dtype must be a dtype or the name of one; got 'bf16'"),
    ],
)
def test_no_array(p, f, text):
    with pytest.raises(TypeError, match=text):
        f(p.tensor)


def test_repr(rng):
    """Shapes and no numbers; of whatever its leaves are."""
    w = quantize(rng.standard_normal((5, 70)).astype(np.float32), bits=3, group_size=32)
    text = (
        "QuantizedTensor(shape=(5, 70), bits=3, group_size=32, k=70, packed=uint32[5,7], scale=float32[5,3], "
    )
    assert repr(w) == f"{text}zero=float32[5,3])"
    assert repr(jax.eval_shape(lambda: w)) == repr(w)
    assert repr(jax.tree.map(lambda _: None, w)) == "QuantizedTensor(bits=3, group_size=32, k=70)"
    for of in (lambda a: a.dtype, jnp.sum):
        assert repr(jax.tree.map(of, w)).startswith("QuantizedTensor(bits=3, group_size=32, k=70, packed=")


def test_no_rows():
    """What an embedding gives for no tokens."""
    w = quantize(jnp.ones((4, 32)))
    assert w[jnp.zeros(0, int)].dequantize().shape == (0, 32)
    assert quantize(jnp.ones((0, 4, 32))).dequantize().shape == (0, 4, 32)


def test_a_number_for_a_scale(p):
    w = QuantizedTensor(packed=p.packed, scale=2.0, bits=4)
    assert w.dequantize().shape == (6, 48)


def test_no_bits(p):
    with pytest.raises(ValueError, match="QuantizedTensor: bits must be an integer from 1 to 8; got None"):
        print(QuantizedTensor(packed=p.packed, scale=p.scale).shape)
