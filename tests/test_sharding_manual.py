"""Inside a user's shard_map: over all axes of the mesh, and over some, the others Explicit or left to the compiler."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import (
    PARTIAL_GATHERS,
    collectives,
    kernel_calls,
    mesh_of,
    moved_codes,
    put,
    put_weight,
    stack,
    weight_shardings,
)

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, gemv, gemv_int4

CASE = Case(4, 16, 512, 64, "zero", bias=True)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])


def of_weight(w, mesh, *spec):
    """in_specs for a weight."""
    return jax.tree.map(lambda s: s.spec, weight_shardings(w, mesh, *spec))


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("w_spec", [("model", None), (None, "model")], ids=str)
def test_all_axes(kind, check_vma, w_spec, rng):
    """The program says itself what is summed; gemv is one kernel on each device."""
    mesh = mesh_of(kind)
    p = make(rng, 4, "float32", CASE, exact=True)
    n, k = w_spec
    x, w, bias = put(p.x, mesh, "data", k), put_weight(p.tensor, mesh, *w_spec), put(p.bias, mesh, n)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", k), of_weight(p.tensor, mesh, *w_spec), P(n)),
        out_specs=P("data", n),
        check_vma=check_vma,
    )
    def f(x, w, bias):
        if k is None:
            return gemv(x, w, bias=bias, implementation="cpu")
        return jax.lax.psum(gemv(x, w, implementation="cpu"), k) + bias

    np.testing.assert_array_equal(f(x, w, bias), p.answer())
    compiled = f.lower(x, w, bias).compile()
    assert collectives(compiled) == ({} if k is None else {"all-reduce": 1})
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []


@KINDS
def test_gradients(kind, rng):
    """Inside, of the loss outside; each operand varies over other axes."""
    mesh = mesh_of(kind)
    p = make(rng, 4, "float32", CASE, exact=True)
    weights = np.arange(64.0, dtype=np.float32).reshape(4, 16) - 30

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("model"), P("model"), of_weight(p.tensor, mesh, "model", None)),
        out_specs=P("data", "model"),
    )
    def f(x, scale, bias, w):
        return gemv(x, QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4), bias=bias)

    def plain(x, scale, bias, w):
        return gemv(x, QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4), bias=bias)

    def grads(f, weights):
        return jax.jit(jax.grad(lambda x, s, b, w: jnp.sum(f(x, s, b, w) * weights), (0, 1, 2)))

    expected = grads(plain, weights)(p.x, p.scale, p.bias, p.tensor)
    with jax.set_mesh(mesh):
        w = put_weight(p.tensor, mesh, "model", None)
        cut = put(weights, mesh, "data", "model")
        at = put(p.x, mesh, "data"), w.scale, put(p.bias, mesh, "model")
        found = grads(f, cut)(*at, w)
        y, tangent = jax.jit(lambda x, s, b, w: jax.jvp(lambda x: f(x, s, b, w), (x,), (x,)))(*at, w)
    np.testing.assert_array_equal(tangent, y - p.bias)
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(a, b)


@KINDS
@pytest.mark.parametrize("axes", [("data", "model"), ("data",)], ids=["all", "some"])
@pytest.mark.parametrize("w_spec", [("model", None), (None, "model")], ids=str)
def test_gradients_of_x(kind, axes, w_spec, rng):
    """By one kernel on each device, on weights that stay where they are, over all axes and beside one that is left."""
    if kind == AxisType.Explicit and len(axes) == 1 and PARTIAL_GATHERS:
        pytest.skip("this jax gathers the operands of such a shard_map")
    mesh = mesh_of(kind)
    p = make(rng, 4, "float32", CASE, exact=True)
    ct = rng.integers(-2, 3, (4, 16)).astype(np.float32)
    n, k = w_spec
    own_n, own_k = (axis if axis in axes else None for axis in w_spec)
    weight = of_weight(p.tensor, mesh, own_n, own_k) if len(axes) == 2 else P()

    @partial(
        jax.shard_map,
        in_specs=(P("data", own_k), weight, P("data", own_n)),
        out_specs=P("data", own_k),
        axis_names=set(axes),
    )
    def f(x, w, ct):
        def product(x):
            y = gemv(x, w, implementation="cpu")
            return y if own_k is None else jax.lax.psum(y, own_k)

        return jax.vjp(product, x)[1](ct)[0]

    with jax.set_mesh(mesh):
        args = put(p.x, mesh, "data", k), put_weight(p.tensor, mesh, n, k), put(ct, mesh, "data", n)
        compiled = jax.jit(f).lower(*args).compile()
        np.testing.assert_array_equal(compiled(*args), ct @ p.weight())
    assert (kernel_calls(compiled), moved_codes(compiled)) == (1, [])
    assert collectives(compiled) == ({"all-reduce": 1} if n else {})


@KINDS
@pytest.mark.parametrize("manual", ["data", "model"])
@pytest.mark.parametrize("w_spec", [("own", None), (None, "own")], ids=["columns", "rows"])
def test_some_axes(kind, manual, w_spec, rng):
    """x is cut by the user, the weight by the axis that is left: the same program as without a shard_map."""
    mesh = mesh_of(kind)
    left = {"data": "model", "model": "data"}[manual]
    n, k = (left if axis else None for axis in w_spec)
    p = make(rng, 3, "float32", CASE, exact=True)

    @jax.jit
    @partial(
        jax.shard_map,
        in_specs=(P(manual), P(), P()),
        out_specs=P(manual),
        axis_names={manual},
    )
    def f(x, w, bias):
        return gemv(x, w, bias=bias, implementation="cpu")

    with jax.set_mesh(mesh):
        args = put(p.x, mesh, manual), put_weight(p.tensor, mesh, n, k), put(p.bias, mesh, n)
        np.testing.assert_array_equal(f(*args), p.answer())
        compiled = f.lower(*args).compile()
    assert kernel_calls(compiled) == 1
    if kind == AxisType.Auto or not PARTIAL_GATHERS:
        assert collectives(compiled) == ({} if k is None else {"all-reduce": 1})
        assert moved_codes(compiled) == []


@KINDS
@pytest.mark.parametrize(
    "w_spec", [(None, "model", None), (None, None, "model"), ("model", None, None)], ids=str
)
def test_transformations_beside_an_axis_that_is_left(kind, w_spec, rng):
    """index, vmap, scan and grad in a shard_map over "data"."""
    mesh = mesh_of(kind)
    problems = [make(rng, 4, "float32", Case(4, 512, 512, 64, "zero"), exact=True) for _ in range(4)]
    x, index = problems[0].x, np.array([3, 0, 9, 1], np.int32)
    expected = np.stack([x @ p.weight().T for p in problems])

    def each(f, out):
        return jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=out, axis_names={"data"}
            )
        )

    with jax.set_mesh(mesh):
        w = put_weight(stack(problems), mesh, *w_spec)
        args = put(x, mesh, "data"), put(index, mesh, "data"), w
        y = each(lambda x, i, w: gemv(x, w, index=i), P("data"))(*args)
        rows = [expected[3][0], expected[0][1], np.full(512, np.nan), expected[1][3]]
        np.testing.assert_array_equal(y, np.stack(rows))
        y = each(lambda x, i, w: jax.vmap(gemv, (None, 0))(x, w), P(None, "data"))(*args)
        np.testing.assert_array_equal(y, expected)
        y = each(lambda x, i, w: jax.vmap(lambda x: gemv(x, w, index=2))(x), P("data"))(*args)
        np.testing.assert_array_equal(y, expected[2])
        grad = each(lambda x, i, w: jax.grad(lambda x: gemv(x, w, index=1).sum())(x), P("data"))(*args)
        np.testing.assert_array_equal(grad, np.broadcast_to(problems[1].weight().sum(0), x.shape))
        if w_spec[0] is None:
            y = each(
                lambda x, i, w: jax.lax.scan(lambda _, w: (None, gemv(x, w)), None, w)[1], P(None, "data")
            )
            np.testing.assert_array_equal(y(*args), expected)


def test_two_axes_left(rng):
    """In what order they cut is not told, so the reference runs, cut by XLA; kernels may not be asked for."""
    mesh = mesh_of(AxisType.Auto, (2, 2, 2), ("a", "b", "c"))
    p = make(rng, 4, "float32", CASE, exact=True)
    x = put(p.x, mesh, "a")
    for spec in (("b", "c"), ("c", "b"), (("c", "b"), None), (None, ("b", "c"))):
        w = put_weight(p.tensor, mesh, *spec)
        f = partial(jax.shard_map, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
        compiled = jax.jit(f(gemv)).lower(x, w).compile()
        np.testing.assert_array_equal(compiled(x, w), p.answer() - p.bias)
        assert collectives(compiled) == ({} if spec[1] is None else {"all-reduce": 1})
    text = "gemv: implementation='cpu' cannot run: shard_map leaves the mesh axes b, c to the compiler"
    with pytest.raises(NotImplementedError, match=text):
        jax.jit(f(partial(gemv, implementation="cpu")))(x, w)


@KINDS
def test_export(kind, rng):
    mesh = mesh_of(kind)
    p = make(rng, 4, "float32", CASE, exact=True)
    x, w = put(p.x, mesh, "data"), put_weight(p.tensor, mesh, "model", None)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("model"), P("model"), P("model")),
        out_specs=P("data", "model"),
    )
    def f(x, packed, scale, zero):
        return gemv_int4(x, packed, zero, scale)

    args = x, w.packed, w.scale, w.zero
    exported = jax.export.export(f, platforms=("cpu",), disabled_checks=EXPORT_CHECKS)(*args)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(*args), p.answer() - p.bias)


@KINDS
@pytest.mark.parametrize("parts", [{}, {"norm": np.ones(64, np.float32)}], ids=["product", "norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cotangents_of_16_bit_x_add_up(kind, parts, dtype, rng):
    """What devices have of them cancels, and overflows float16: not to be rounded before it is summed."""
    mesh, order = mesh_of(kind), np.r_[0:8:2, 1:8:2]
    codes, ct = rng.integers(9, 16, (8, 64)), rng.uniform(4000, 8000, 8)
    codes, ct = np.concatenate([codes, 16 - codes[order]]), np.concatenate([ct, ct[order]])
    ct = jnp.asarray(ct[None], dtype).at[0, 0].add(64)
    w = QuantizedTensor.from_codes(codes, np.ones(16, np.float32), bits=4)
    x = jnp.asarray(rng.uniform(1, 2, (1, 64)), dtype)

    def dx(x, w, ct):
        return jax.vjp(lambda x: gemv(x, w, **parts), x)[1](ct)[0]

    alone = np.asarray(dx(x, w, ct), np.float32)
    if not parts:
        np.testing.assert_allclose(alone, np.asarray(ct, np.float64) @ (codes - 8.0), rtol=2**-7)
    specs = P(), of_weight(w, mesh, "model", None), P(None, "model")
    cut = jax.jit(jax.shard_map(dx, mesh=mesh, in_specs=specs, out_specs=P()))
    there = put(x, mesh), put_weight(w, mesh, "model", None), put(ct, mesh, None, "model")
    error = np.abs(np.asarray(cut(*there), np.float32) - alone)
    assert error.max() <= 2**-7 * np.abs(alone).max()


@KINDS
def test_tangents_of_each_device(kind, rng):
    """Of an x that all have alike, beside rows of the weight that each has for itself."""
    mesh = mesh_of(kind)
    p = make(rng, 4, "float32", CASE, exact=True)
    tangents = rng.integers(-2, 3, (4 * 4, 512)).astype(np.float32)

    def f(x, w, tangent):
        return jax.jvp(lambda x: gemv(x, w), (x,), (tangent,))[1]

    specs = P(), of_weight(p.tensor, mesh, "model", None), P("model")
    cut = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("model")))
    args = put(p.x, mesh), put_weight(p.tensor, mesh, "model", None), put(tangents, mesh, "model")
    weight = p.weight().reshape(4, 4, 512)
    expected = np.einsum("dmk,dnk->dmn", tangents.reshape(4, 4, 512), weight).reshape(16, 4)
    np.testing.assert_array_equal(cut(*args), expected)
