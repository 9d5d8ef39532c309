"""jit over a mesh of Auto axes: the compiler asks how to cut a gemv, and weights stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from problems import Case, make
from sharded import (
    CASE,
    GRADIENTS,
    LAYOUTS,
    STACKS,
    assert_cut_in_place,
    collectives,
    every_layout,
    kernel_calls,
    laid_out,
    mesh_of,
    moved_codes,
    put,
    put_weight,
    spec_of,
    stack,
)
from tolerance import assert_close

from jaxgemv import QuantizedTensor, gemv


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(AxisType.Auto)


@pytest.fixture(params=["cpu", "xla"])
def implementation(request):
    with jax.default_device(jax.devices("cpu")[0]):
        yield request.param


@every_layout
def test_layouts(implementation, mesh, layout, rng):
    *_, y_spec, expected = LAYOUTS[layout]
    p, args = laid_out(layout, 3 if "data" in layout else 4, mesh, rng)
    f = jax.jit(lambda x, w, b: gemv(x, w, bias=b, implementation=implementation))
    y = f(*args)
    np.testing.assert_array_equal(y, p.answer())
    assert spec_of(y) == y_spec
    assert_cut_in_place(f.lower(*args).compile(), expected, implementation)


@every_layout
def test_gradients_of_x(implementation, mesh, layout, rng):
    """By one kernel on each device, too, on weights that stay where they are."""
    p, (x, w, _) = laid_out(layout, 3 if "data" in layout else 4, mesh, rng)
    ct = rng.integers(-2, 3, (4, 16)).astype(np.float32)

    @jax.jit
    def f(x, w, ct):
        return jax.vjp(lambda x: gemv(x, w, implementation=implementation), x)[1](ct)[0]

    args = x, w, put(ct, mesh, *LAYOUTS[layout][2])
    np.testing.assert_array_equal(f(*args), ct @ p.weight())
    assert_cut_in_place(f.lower(*args).compile(), GRADIENTS[layout], implementation)


@pytest.mark.parametrize("w_spec", STACKS, ids=str)
def test_gradient_of_index(implementation, mesh, w_spec, rng):
    """Of a stack that may be sharded itself. Rows whose index is out of range do not depend on x."""
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(4)]
    w = put_weight(stack(problems), mesh, *w_spec)
    index = np.array([3, 0, -1, 4], np.int32)
    ct = rng.integers(-2, 3, (4, 16)).astype(np.float32)

    @jax.jit
    def f(x, w, i, ct):
        return jax.vjp(lambda x: gemv(x, w, index=i, implementation=implementation), x)[1](ct)[0]

    args = put(problems[0].x, mesh), w, put(index, mesh), put(ct, mesh)
    expected = np.zeros((4, 512))
    expected[0], expected[1] = ct[0] @ problems[3].weight(), ct[1] @ problems[0].weight()
    np.testing.assert_array_equal(f(*args), expected)
    if implementation == "cpu":
        compiled = f.lower(*args).compile()
        assert (kernel_calls(compiled), moved_codes(compiled)) == (1, [])
        assert collectives(compiled) == ({} if w_spec == STACKS[1] else {"all-reduce": 1})


@pytest.mark.parametrize("w_spec", [("model", None), (None, "model"), ("data", "model")], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 16, 512, "tensor", "mid"),
        Case(2, 16, 512, "row", "zero"),
        Case(2, 16, 512, 128, "integer", bytes=True),
        Case(2, 16, 512, 32, "offset", bias=True),
        Case(2, 16, 512, 512, "fraction"),  # (N, 1): one group that all parts of K share
    ],
    ids=str,
)
def test_forms(implementation, mesh, w_spec, case, rng):
    """Every parameter goes with the rows and groups that it belongs to."""
    p = make(rng, 4, "float32", case, exact=True)
    w = put_weight(p.tensor, mesh, *w_spec)
    y = jax.jit(lambda x, w: gemv(x, w, bias=p.bias, implementation=implementation))(p.x, w)
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("bits", range(1, 9))
def test_widths(mesh, bits, rng):
    p = make(rng, bits, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, "data", "model")
    np.testing.assert_array_equal(jax.jit(gemv)(p.x, w), p.answer() - p.bias)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounds_once(implementation, mesh, dtype, rng):
    """Parts of K are summed in float32; the bias comes in before the result is rounded."""
    p = make(rng, 4, dtype, Case(3, 24, 1024, 128, "zero", bias=True))
    w = put_weight(p.tensor, mesh, None, "model")
    y = jax.jit(lambda x, w, b: gemv(x, w, bias=b, implementation=implementation))(p.x, w, p.bias)
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.dtype(dtype))


def test_replicated_parameters(mesh, rng):
    """Parameters that lie elsewhere come to the codes."""
    p = make(rng, 4, "float32", CASE, exact=True)
    w = p.tensor
    w = QuantizedTensor(
        packed=put(w.packed, mesh, None, "model"),
        scale=put(w.scale, mesh),
        zero=put(w.zero, mesh, "model"),
        bits=4,
    )
    compiled = jax.jit(gemv).lower(put(p.x, mesh), w).compile()
    assert moved_codes(compiled) == []
    np.testing.assert_array_equal(compiled(put(p.x, mesh), w), p.answer() - p.bias)


def test_codebook(mesh, rng):
    book = np.arange(16, dtype=np.float32) - 6
    p = make(rng, 4, "float32", Case(2, 16, 512, 64), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=p.scale, codebook=book, bits=4)
    expected = gemv(p.x, w)
    for spec in (("model", None), (None, "model")):
        np.testing.assert_array_equal(jax.jit(gemv)(p.x, put_weight(w, mesh, *spec)), expected)


@pytest.mark.parametrize("rows", [(), (70,), (2, 3), (2, 40)])
def test_any_rank(mesh, rows, rng):
    """Also more rows than kernels take, and fewer on each device than that."""
    p = make(rng, 4, "float32", CASE, exact=True)
    x = rng.integers(-2, 3, (*rows, 512)).astype(np.float32)
    w = put_weight(p.tensor, mesh, None, "model")
    y = jax.jit(gemv)(put(x, mesh, *["data"] * (len(rows) > 0)), w)
    np.testing.assert_array_equal(y, x @ p.weight().T)


def test_mlp(mesh, rng):
    """Columns, then rows: one all-reduce, of what leaves."""
    up = make(rng, 4, "float32", Case(4, 512, 64, 32, "zero", bias=True), exact=True)
    down = make(rng, 8, "float32", Case(4, 24, 512, 64, "offset"), exact=True)

    @jax.jit
    def mlp(x, up, down, bias):
        return gemv(jnp.clip(gemv(x, up, bias=bias), -1, 1), down)

    args = (
        put(up.x, mesh, "data"),
        put_weight(up.tensor, mesh, "model", None),
        put_weight(down.tensor, mesh, None, "model"),
        put(up.bias, mesh, "model"),
    )
    compiled = mlp.lower(*args).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    assert kernel_calls(compiled) == 2
    assert moved_codes(compiled) == []
    np.testing.assert_array_equal(compiled(*args), np.clip(up.answer(), -1, 1) @ down.weight().T)


def test_int8_x(mesh, rng):
    """An exact int32 sum over all parts."""
    p = make(rng, 4, "float32", Case(3, 16, 512, "row", "integer"), exact=True)
    w = QuantizedTensor(packed=p.packed, scale=None, zero=p.zero, bits=4)
    x = rng.integers(-128, 128, (3, 512)).astype(np.int8)
    expected = gemv(x, w)
    for spec in (("model", None), (None, "model")):
        y = jax.jit(gemv)(x, put_weight(w, mesh, *spec))
        assert y.dtype == jnp.int32
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("w_spec", [("model", None), (None, "model")], ids=str)
def test_derivatives(mesh, w_spec, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w, bias, x = put_weight(p.tensor, mesh, *w_spec), put(p.bias, mesh, w_spec[0]), put(p.x, mesh, "data")
    weights = np.arange(64.0, dtype=np.float32).reshape(4, 16) - 30

    def loss(x, scale, bias, w):
        w = QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4)
        return jnp.sum(gemv(x, w, bias=bias) * weights)

    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = grad(p.x, p.scale, p.bias, p.tensor)
    np.testing.assert_array_equal(expected[0], weights @ p.weight())
    for a, b in zip(grad(x, w.scale, bias, w), expected):
        np.testing.assert_array_equal(a, b)
    y, tangent = jax.jit(lambda x, w: jax.jvp(lambda x: gemv(x, w), (x,), (2 * x,)))(x, w)
    np.testing.assert_array_equal(tangent, 2 * y)


def test_vmap_over_x(mesh, rng):
    """The mapped dimension stays sharded."""
    p = make(rng, 4, "float32", CASE, exact=True)
    x, w = put(np.stack([p.x, p.x + 1]), mesh, "data"), put_weight(p.tensor, mesh, "model", None)
    compiled = jax.jit(jax.vmap(gemv, (0, None))).lower(x, w).compile()
    assert collectives(compiled) == {}
    assert kernel_calls(compiled) == 1
    np.testing.assert_array_equal(compiled(x, w)[0], p.answer() - p.bias)


@pytest.mark.parametrize("w_spec", [(None, "model", None), (None, None, "model")], ids=str)
def test_scan(mesh, w_spec, rng):
    """Layers of a stack; sums stay exact because each step is reduced modulo 5."""
    problems = [make(rng, 4, "float32", Case(2, 128, 128, 32, "zero"), exact=True) for _ in range(3)]
    x = expected = problems[0].x
    for p in problems:
        expected = (expected @ p.weight().T) % 5
    w = put_weight(stack(problems), mesh, *w_spec)
    f = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (gemv(x, w) % 5, None), x, w)[0])
    np.testing.assert_array_equal(f(x, w), expected)
    indexed = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: gemv(x, w, index=i) % 5, x))
    np.testing.assert_array_equal(indexed(x, w), expected)


@pytest.mark.parametrize("w_spec", STACKS, ids=str)
def test_index(implementation, mesh, w_spec, rng):
    """Experts, in a stack that may be sharded itself: no device sees another's; out of range gives NaN still."""
    problems = [
        make(rng, 4, "float32", Case(6, 16, 512, 64, "zero", bias=True), exact=True) for _ in range(4)
    ]
    w = put_weight(stack(problems), mesh, *w_spec)
    bias = put(np.stack([p.bias for p in problems]), mesh, *w_spec[:2])
    x, index = problems[0].x, np.array([3, 0, -1, 1, 4, 2], np.int32)
    f = jax.jit(lambda x, w, b, i: gemv(x, w, index=i, bias=b, implementation=implementation))
    expected = np.full((6, 16), np.nan)
    for row, i in enumerate(index):
        if 0 <= i < 4:
            expected[row] = x[row] @ problems[i].weight().T + problems[i].bias
    np.testing.assert_array_equal(f(x, w, bias, index), expected)
    # One entry for all rows, as for layers.
    np.testing.assert_array_equal(f(x, w, bias, np.int32(2)), x @ problems[2].weight().T + problems[2].bias)
    if implementation == "cpu":
        compiled = f.lower(put(x, mesh), w, bias, put(index, mesh)).compile()
        assert moved_codes(compiled) == []
        assert collectives(compiled) == ({} if w_spec == STACKS[0] else {"all-reduce": 1})


def test_index_of_integer_products(mesh, rng):
    """Out of range is the smallest int32, and not a sum of several."""
    problems = [make(rng, 4, "float32", Case(1, 16, 512, "row", "integer"), exact=True) for _ in range(2)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    w = QuantizedTensor(packed=w.packed, scale=None, zero=w.zero, bits=4)
    x, index = rng.integers(-9, 9, (3, 512)).astype(np.int8), np.array([1, 2, 0])
    expected = gemv(x, w, index=index)
    assert (np.asarray(expected[1]) == np.iinfo(np.int32).min).all()
    y = jax.jit(lambda x, w: gemv(x, w, index=index))(x, put_weight(w, mesh, None, None, "model"))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("w_spec", [*STACKS[:2], ("data", "model", None)], ids=str)
def test_vmap_over_weights(mesh, w_spec, rng):
    problems = [make(rng, 4, "float32", Case(2, 16, 512, 64, "offset"), exact=True) for _ in range(4)]
    w, x = put_weight(stack(problems), mesh, *w_spec), np.stack([p.x for p in problems])
    expected = np.stack([p.answer() for p in problems])
    np.testing.assert_array_equal(jax.jit(jax.vmap(gemv))(put(x, mesh, w_spec[0]), w), expected)
    grad = jax.jit(jax.grad(lambda x, w: jax.vmap(gemv)(x, w).sum()))(x, w)
    sums = [np.broadcast_to(p.weight().sum(0), p.x.shape) for p in problems]
    np.testing.assert_array_equal(grad, np.stack(sums))


@pytest.mark.parametrize("w_spec", [("model", None), (None, "model")], ids=str)
def test_dense(mesh, w_spec, rng):
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 64), (16, 64)))
    y = jax.jit(gemv)(x, put(w, mesh, *w_spec))
    np.testing.assert_array_equal(y, x @ w.T)


def test_one_column_of_a_stack(mesh, implementation):
    """x has no dimension then that is cut as K is: the first factor that is summed over is the stack's."""
    w = QuantizedTensor(packed=jnp.full((3, 24, 4), 17, jnp.uint8), scale=jnp.ones((3, 24)), bits=5, k=1)
    args = put(np.ones((2, 1), np.float32), mesh), jax.tree.map(lambda a: put(a, mesh, None, "model"), w)
    y = jax.jit(lambda x, w, i: gemv(x, w, index=i, implementation=implementation))(*args, np.array([0, 2]))
    np.testing.assert_array_equal(y, np.ones((2, 24)))
