"""Explicit axes: the types of the operands say how a gemv is cut, and its own type says the outcome."""

import dataclasses
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import (
    CASE,
    GRADIENTS,
    LAYOUTS,
    PARTIAL_GATHERS,
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
    stack,
)

import jaxgemv
from jaxgemv import QuantizedTensor, gemv, reference


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(AxisType.Explicit)


@pytest.fixture(params=["cpu", "xla"])
def implementation(request):
    return request.param


def dims_of_type(a) -> tuple:
    """The sharding in an array's type, one entry a dimension."""
    spec = jax.typeof(a).sharding.spec
    return (*spec, *(None,) * (a.ndim - len(spec)))


@every_layout
def test_layouts(implementation, mesh, layout, rng):
    *_, y_spec, expected = LAYOUTS[layout]
    p, args = laid_out(layout, 4, mesh, rng)

    def f(x, w, b):
        return gemv(x, w, bias=b, implementation=implementation)

    for y in (jax.jit(f)(*args), f(*args)):
        np.testing.assert_array_equal(y, p.answer())
        assert dims_of_type(y) == y_spec
    assert_cut_in_place(jax.jit(f).lower(*args).compile(), expected, implementation)


def test_type_while_tracing(mesh, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, "model", None)
    types = []

    @jax.jit
    def f(x, w):
        y = gemv(x, w)
        types.append(dims_of_type(y))
        return y

    f(put(p.x, mesh, "data"), w)
    assert types == [("data", "model")]


@pytest.mark.parametrize("set_mesh", [True, False])
def test_operands_of_no_mesh(mesh, set_mesh, rng):
    """An x or a bias from numpy is the same on every device."""
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, "data", "model")
    for f in (gemv, jax.jit(gemv)):
        if set_mesh:
            with jax.set_mesh(mesh):
                y = f(p.x, w, bias=p.bias)
        else:
            y = f(p.x, w, bias=p.bias)
        np.testing.assert_array_equal(y, p.answer())
        assert dims_of_type(y) == (None, "data")


def test_under_set_mesh(mesh, rng):
    """Where no operand is on the mesh that is in use, all are everywhere."""
    p = make(rng, 4, "float32", CASE, exact=True)
    w = stack([p, p])
    with jax.set_mesh(mesh):
        for f in (gemv, jax.jit(gemv)):
            y = f(p.x, p.tensor, bias=p.bias)
            np.testing.assert_array_equal(y, p.answer())
            assert dims_of_type(y) == (None, None)
        y = jax.jit(lambda x, w: gemv(x, w, index=np.array([0, 1, 0, 1])))(p.x, w)
        np.testing.assert_array_equal(y, p.answer() - p.bias)
        y = jax.jit(jax.vmap(gemv, (None, 0)))(p.x, w)
        np.testing.assert_array_equal(y, np.stack([p.answer() - p.bias] * 2))


def test_gemv_int4(mesh, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, "model", None)
    y = jaxgemv.gemv_int4(p.x, w.packed, w.zero, w.scale, out_sharding=P("data"))
    np.testing.assert_array_equal(y, p.answer() - p.bias)
    assert dims_of_type(y) == ("data", None)


@pytest.mark.parametrize("spec", [P(), P("data", "model"), P(None, ("data", "model"))], ids=str)
def test_out_sharding(mesh, spec, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, None, "model")
    for out in (spec, NamedSharding(mesh, spec)):
        for f in (gemv, reference.gemv):
            y = jax.jit(partial(f, out_sharding=out))(p.x, w)
            np.testing.assert_array_equal(y, p.answer() - p.bias)
            assert dims_of_type(y) == (*spec, *(None,) * (2 - len(spec)))


@pytest.mark.parametrize("layout", ["columns", "rows", "both", "data and columns", "x against columns"])
def test_derivatives(mesh, layout, rng):
    """In values as on one device, in types like what they belong to."""
    x_spec, w_spec, y_spec, _ = LAYOUTS[layout]
    p = make(rng, 4, "float32", CASE, exact=True)
    weights = np.arange(64.0, dtype=np.float32).reshape(4, 16) - 30

    def loss(x, scale, bias, w, weights):
        w = QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4)
        return jnp.sum(gemv(x, w, bias=bias) * weights)

    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = grad(p.x, p.scale, p.bias, p.tensor, weights)
    with jax.set_mesh(mesh):
        x, w = put(p.x, mesh, *x_spec), put_weight(p.tensor, mesh, *w_spec)
        at = (x, w.scale, put(p.bias, mesh, w_spec[0]))
        for a, b, operand in zip(grad(*at, w, put(weights, mesh, *y_spec)), expected, at):
            np.testing.assert_array_equal(a, b)
            assert dims_of_type(a) == dims_of_type(operand)
        y, tangent = jax.jit(lambda x, w: jax.jvp(lambda x: gemv(x, w), (x,), (2 * x,)))(x, w)
    np.testing.assert_array_equal(tangent, 2 * y)
    assert dims_of_type(tangent) == dims_of_type(y)


@every_layout
def test_gradients_of_x(implementation, mesh, layout, rng):
    """By one kernel on each device, too, on weights that stay where they are; of x's type."""
    p, (x, w, _) = laid_out(layout, 4, mesh, rng)
    ct = rng.integers(-2, 3, (4, 16)).astype(np.float32)

    @jax.jit
    def f(x, w, ct):
        return jax.vjp(lambda x: gemv(x, w, implementation=implementation), x)[1](ct)[0]

    with jax.set_mesh(mesh):
        args = x, w, put(ct, mesh, *LAYOUTS[layout][2])
        dx = f(*args)
        compiled = f.lower(*args).compile()
    np.testing.assert_array_equal(dx, ct @ p.weight())
    assert dims_of_type(dx) == dims_of_type(x)
    # An x that is not cut as the weight's K takes one more step, as in the product.
    as_k = LAYOUTS[layout][0][1] == LAYOUTS[layout][1][1]
    expected = GRADIENTS[layout] if as_k else collectives(compiled)
    assert_cut_in_place(compiled, expected, implementation)


@pytest.mark.parametrize("w_spec", STACKS, ids=str)
def test_gradient_of_index(implementation, mesh, w_spec, rng):
    """Of a stack that may be sharded itself. Rows whose index is out of range do not depend on x."""
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(4)]
    index = np.array([3, 0, -1, 4], np.int32)
    ct = rng.integers(-2, 3, (4, 16)).astype(np.float32)

    expected = np.zeros((4, 512))
    expected[0], expected[1] = ct[0] @ problems[3].weight(), ct[1] @ problems[0].weight()
    with jax.set_mesh(mesh):
        w = put_weight(stack(problems), mesh, *w_spec)
        args = put(problems[0].x, mesh), w, put(index, mesh), put(ct, mesh, None, w_spec[1])

        @jax.jit
        def f(x, w, i, ct):
            return jax.vjp(lambda x: gemv(x, w, index=i, implementation=implementation), x)[1](ct)[0]

        np.testing.assert_array_equal(f(*args), expected)
        compiled = f.lower(*args).compile()
    if implementation == "cpu":
        assert (kernel_calls(compiled), moved_codes(compiled)) == (1, [])


def test_vmap_over_x(mesh, rng):
    """Also over a dimension that is sharded itself."""
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, "model", None)
    with jax.set_mesh(mesh):
        for axis in (None, "data"):
            x = put(np.stack([p.x, p.x + 1]), mesh, axis)
            f = jax.jit(jax.vmap(gemv, (0, None)))
            y = f(x, w)
            np.testing.assert_array_equal(np.asarray(y)[0], p.answer() - p.bias)
            assert dims_of_type(y) == (axis, None, "model")
            compiled = f.lower(x, w).compile()
            assert kernel_calls(compiled) == 1
            if axis is None or not PARTIAL_GATHERS:
                assert collectives(compiled) == {}


@pytest.mark.parametrize("w_spec", [*STACKS[:2], ("data", "model", None)], ids=str)
def test_vmap_over_weights(mesh, w_spec, rng):
    problems = [make(rng, 4, "float32", Case(2, 16, 512, 64, "offset"), exact=True) for _ in range(4)]
    expected = np.stack([p.answer() for p in problems])
    sums = np.stack([np.broadcast_to(p.weight().sum(0), p.x.shape) for p in problems])
    with jax.set_mesh(mesh):
        w = put_weight(stack(problems), mesh, *w_spec)
        x = put(np.stack([p.x for p in problems]), mesh, w_spec[0])
        f = jax.jit(jax.vmap(gemv))
        np.testing.assert_array_equal(f(x, w), expected)
        compiled = f.lower(x, w).compile()
        if w_spec[0] is None or not PARTIAL_GATHERS:
            assert moved_codes(compiled) == []
            assert collectives(compiled) == ({"all-reduce": 1} if w_spec[2] else {})
        grad = jax.jit(jax.grad(lambda x, w: jax.vmap(gemv)(x, w).sum()))(x, w)
    np.testing.assert_array_equal(grad, sums)


@pytest.mark.parametrize("w_spec", STACKS, ids=str)
def test_index(mesh, w_spec, rng):
    problems = [make(rng, 4, "float32", Case(6, 16, 512, 64, "zero"), exact=True) for _ in range(4)]
    x, index = problems[0].x, np.array([3, 0, -1, 1, 4, 2], np.int32)
    expected = np.full((6, 16), np.nan)
    for row, i in enumerate(index):
        if 0 <= i < 4:
            expected[row] = x[row] @ problems[i].weight().T
    w = put_weight(stack(problems), mesh, *w_spec)
    y = jax.jit(lambda x, w, i: gemv(x, w, index=i))(x, w, index)
    np.testing.assert_array_equal(y, expected)
    assert dims_of_type(y) == (None, w_spec[1])
    # The experts of rows that are sharded themselves.
    if w_spec[1:] == ("model", None) and w_spec[0] is None:
        y = gemv(put(x, mesh, "data"), w, index=put(index, mesh, "data"))
        np.testing.assert_array_equal(y, expected)
        assert dims_of_type(y) == ("data", "model")


@pytest.mark.parametrize("w_spec", STACKS[:2], ids=str)
def test_scan(mesh, w_spec, rng):
    problems = [make(rng, 4, "float32", Case(2, 128, 128, 32, "zero"), exact=True) for _ in range(3)]
    x = expected = problems[0].x
    for p in problems:
        expected = (expected @ p.weight().T) % 5
    with jax.set_mesh(mesh):
        w, x = put_weight(stack(problems), mesh, *w_spec), put(x, mesh)
        f = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (gemv(x, w, out_sharding=P()) % 5, None), x, w)[0])
        np.testing.assert_array_equal(f(x, w), expected)


def test_mlp(mesh, rng):
    up = make(rng, 4, "float32", Case(4, 512, 64, 32, "zero"), exact=True)
    down = make(rng, 8, "float32", Case(4, 24, 512, 64, "offset"), exact=True)
    f = jax.jit(lambda x, up, down: gemv(jnp.clip(gemv(x, up), -1, 1), down))
    args = (
        put(up.x, mesh),
        put_weight(up.tensor, mesh, "model", None),
        put_weight(down.tensor, mesh, None, "model"),
    )
    np.testing.assert_array_equal(f(*args), np.clip(up.answer(), -1, 1) @ down.weight().T)
    compiled = f.lower(*args).compile()
    assert (collectives(compiled), kernel_calls(compiled)) == ({"all-reduce": 1}, 2)


@pytest.mark.parametrize("w_spec", [("model", None), (None, "model"), ("data", "model")], ids=str)
def test_dense(mesh, w_spec, rng):
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 64), (16, 64)))
    cut = put(w, mesh, *w_spec)
    y = jax.jit(gemv)(x, cut)
    np.testing.assert_array_equal(y, x @ w.T)
    assert dims_of_type(y) == (None, w_spec[0])
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(lambda w, x: gemv(x, w).sum()))(cut, x)
    np.testing.assert_array_equal(grad, np.broadcast_to(x.sum(0), (16, 64)))
    assert dims_of_type(grad) == w_spec


def test_export(mesh, rng):
    """Programs for several devices can be exported: to a shard_map, unlike to the partitioner, nothing is secret."""
    p = make(rng, 4, "float32", CASE, exact=True)
    x, w = put(p.x, mesh, "data"), put_weight(p.tensor, mesh, None, "model")
    f = jax.jit(lambda x, packed, scale, zero: jaxgemv.gemv_int4(x, packed, zero, scale))
    args = x, w.packed, w.scale, w.zero
    exported = jax.export.export(f, platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)(*args)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(*args), p.answer() - p.bias)


@pytest.mark.parametrize(
    "w_spec", [("model", None), (None, "model"), ("data", None), ("data", "model")], ids=str
)
def test_beside_auto_axes(w_spec, rng):
    """What the compiler places and what types place, in one mesh, of which jax.set_mesh has to tell."""
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu")[:8])
    p = make(rng, 4, "float32", CASE, exact=True)
    x, w = put(p.x, mesh), put_weight(p.tensor, mesh, *w_spec)
    f = jax.jit(partial(gemv, implementation="cpu"))
    with jax.set_mesh(mesh):
        compiled = f.lower(x, w).compile()
        np.testing.assert_array_equal(f(x, w), p.answer() - p.bias)
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []
    assert collectives(compiled) == ({"all-reduce": 1} if w_spec[1] else {})

    jax.clear_caches()
    compiled = jax.jit(gemv).lower(x, w).compile()
    np.testing.assert_array_equal(compiled(x, w), p.answer() - p.bias)
    assert collectives(compiled) == ({"all-reduce": 1} if w_spec[1] else {})
    with pytest.raises(
        NotImplementedError, match=r"axis data to the compiler, and jax\.set_mesh is not in use"
    ):
        f(x, w)


@pytest.mark.parametrize("w_spec", [("model", None), (None, "model")], ids=str)
def test_in_auto_axes(mesh, w_spec, rng):
    """A function for which Explicit axes are turned into Auto ones: the same."""
    p = make(rng, 4, "float32", CASE, exact=True)
    x, w = put(p.x, mesh), put_weight(p.tensor, mesh, *w_spec)
    f = jax.jit(jax.sharding.auto_axes(partial(gemv, implementation="cpu"), out_sharding=P(None, w_spec[0])))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(f(x, w), p.answer() - p.bias)
        compiled = f.lower(x, w).compile()
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []
    assert collectives(compiled) == ({"all-reduce": 1} if w_spec[1] else {})


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P(None, None, "model")], ids=str)
@pytest.mark.parametrize("has_perm", [False, True], ids=["", "perm"])
@pytest.mark.parametrize("format", [None, "nf4"])
@pytest.mark.parametrize("stack", [(), (4,)], ids=str)
def test_dequantize(mesh, spec, has_perm, format, stack, rng):
    """The weight lies as its codes do, of a stack too, whose tables need not be cut."""
    if stack and has_perm and jax.__version_info__ < (0, 11):
        pytest.skip("this jax has no vmap of a scatter on such a mesh")
    spec = spec if stack else P(*spec[-2:])
    w = jnp.asarray(rng.standard_normal((*stack, 32, 512)), jnp.float32)
    w = jaxgemv.quantize(w, format=format, group_size=64)
    if has_perm:
        perm = rng.permuted(np.tile(np.arange(512, dtype=np.int32), (*stack, 1)), axis=-1)
        w = dataclasses.replace(w, perm=perm.reshape(*stack, 512))
    codes = w.packed.ndim
    cut = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, spec if a.ndim == codes else P())), w)
    for f in (QuantizedTensor.dequantize, jax.jit(QuantizedTensor.dequantize)):
        weight = f(cut)
        assert weight.sharding.is_equivalent_to(NamedSharding(mesh, spec), codes)
        np.testing.assert_array_equal(weight, w.dequantize())
