"""norm, activation and residual on several devices: values, types, gradients, and what is sent."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parts import activated
from problems import Case, make
from sharded import PARTIAL_GATHERS, collectives, kernel_calls, mesh_of, moved_codes, put, put_weight, spec_of
from test_parts import CASE, K, M, N

from jaxgemv import gemv


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "activation"),
    [
        ((None, None), ("model", None), "swiglu"),
        (("data", None), (None, "model"), "gelu"),
        ((None, "model"), ("data", "model"), "swiglu"),
        ((None, "model"), ("model", None), "gelu"),
        (("data", None), ("data", "model"), "gelu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_sharded(kind, x_spec, w_spec, activation, on_cpu, rng):
    """Where K is cut the parts are XLA's; with swiglu over a cut N only y moves. Values, types, gradients."""
    case = CASE._replace(n=24, k=512)  # halves of 12, which four devices hold, and of 3 eight do not
    p = make(rng, 4, "float32", case)
    norm = rng.uniform(0.5, 1.5, 512).astype(np.float32)
    residual = rng.standard_normal((M, 12 if activation == "swiglu" else 24)).astype(np.float32)
    mesh = mesh_of(kind)
    args = put(p.x, mesh, *x_spec), put_weight(p.tensor, mesh, *w_spec), put(norm, mesh), put(residual, mesh)

    def f(x, w, norm, residual):
        return gemv(x, w, norm=norm, activation=activation, residual=residual, implementation="cpu")

    expected = f(p.x, p.tensor, norm, residual)
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*args).compile()
        y = compiled(*args)
        grads = jax.jit(jax.grad(lambda x, w, norm, r: f(x, w, norm, r).sum(), (0, 2, 3)))(*args)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []
    if kind == AxisType.Explicit and w_spec[0] and "data" not in (x_spec[0], w_spec[0]):
        assert spec_of(y)[-1] == w_spec[0]
    alone = jax.grad(lambda x, w, norm, r: f(x, w, norm, r).sum(), (0, 2, 3))(
        *map(jnp.asarray, (p.x,)), p.tensor, norm, residual
    )
    for one, other in zip(grads, alone):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("n", [24, 18], ids=["F divides", "F does not"])
def test_swiglu_over_a_cut_n(kind, n, rng):
    """Of 18 rows over two devices each has 9, and so has a half; of 9 outputs no device has a whole part."""
    p = make(rng, 4, "float32", Case(M, n, 64, "row"), exact=True)
    mesh = mesh_of(kind, (2,), ("model",))
    args = put(p.x, mesh), put_weight(p.tensor, mesh, "model", None)
    f = jax.jit(partial(gemv, activation="swiglu", implementation="cpu"))
    with jax.set_mesh(mesh):
        compiled = f.lower(*args).compile()
    assert moved_codes(compiled) == []
    assert kernel_calls(compiled) == 1
    np.testing.assert_allclose(compiled(*args), activated(p.answer(), "swiglu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize(
    "w_spec", [("model", None, None), (None, "model", None), (None, None, "model")], ids=str
)
def test_sharded_stack(kind, w_spec, on_cpu, rng):
    """With index, norm and global_scale by entry."""
    problems = [make(rng, 4, "float32", Case(M, N, 512, 64, "zero"), exact=True) for _ in range(4)]
    stack = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    perm = np.stack([rng.permutation(512) for _ in range(4)]).astype(np.int32)
    given = {"global_scale": np.float32([1, 2, 4, 8]), "perm": perm}
    norm, x = rng.uniform(0.5, 1.5, (4, 512)).astype(np.float32), problems[0].x
    ids = np.array([1, 3, 4, 0], np.int32)
    mesh = mesh_of(kind)
    w = dataclasses.replace(
        put_weight(stack, mesh, *w_spec), **{name: put(a, mesh) for name, a in given.items()}
    )
    f = jax.jit(
        lambda x, w, norm, ids: gemv(x, w, index=ids, norm=norm, activation="silu", implementation="cpu")
    )
    with jax.set_mesh(mesh):
        compiled = f.lower(
            *(args := (put(x, mesh, "data"), w, put(norm, mesh), put(ids, mesh, "data")))
        ).compile()
        y = compiled(*args)
    assert moved_codes(compiled) == []
    expected = f(x, dataclasses.replace(stack, **given), norm, ids)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.nanmax(np.abs(expected)))
    assert np.isnan(np.asarray(y)[2]).all()


@pytest.fixture
def stacked(rng):
    """x and an index for each row, one of which is out of range, and a stack with all that may be stacked."""
    problems = [make(rng, 4, "float32", Case(16, 24, 128, 64, "zero")) for _ in range(3)]
    stack = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    perm = np.stack([rng.permutation(128) for _ in range(3)]).astype(np.int32)
    w = dataclasses.replace(stack, perm=perm, global_scale=np.float32([1, 2, 4]))
    return problems[0].x, np.array([1, 0, 2, 9, 1, 1, 0, 2] * 2, np.int32), w


PARTS = {
    "none": {},
    "norm": {"norm": np.linspace(0.5, 1.5, 128, dtype=np.float32)},
    "norms": {"norm": np.linspace(0.5, 1.5, 384, dtype=np.float32).reshape(3, 128)},
    "silu": {"activation": "silu", "bias": np.linspace(-1, 1, 72, dtype=np.float32).reshape(3, 24)},
}
every_part = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)


@every_part
@pytest.mark.parametrize("mapped", ["x and index", "index"])
def test_vmap_over_a_cut_index(parts, mapped, stacked, on_cpu):
    """Of which each device has a part, as of x, while the stack is everywhere."""
    if jax.__version_info__ < (0, 9):
        pytest.skip("jax 0.8 has no vmap over an index that is cut, of whatever is in it")
    x, index, w = stacked
    f = jax.vmap(lambda x, i, w: gemv(x, w, index=i, **parts), (0 if mapped != "index" else None, 0, None))
    x = x if mapped != "index" else x[0]
    expected = f(x, index, w)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = (
            put(x, mesh, *["data"][: x.ndim - 1]),
            put(index, mesh, "data"),
            jax.tree.map(lambda a: put(a, mesh), w),
        )
        for y in (f(*args), jax.jit(f)(*args)):
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.nanmax(np.abs(expected)))
            assert spec_of(y)[0] == "data"


@every_part
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_gradients_beside_an_axis_that_is_left(kind, parts, stacked, on_cpu):
    """In a shard_map over some axes, whose own shard_maps then lie inside of it."""
    if PARTIAL_GATHERS:
        pytest.skip("this jax gathers the operands of such a shard_map")
    x, index, w = stacked
    index, parts = index % 3, dict(parts)
    shared = {name: parts.pop(name) for name in ("norm", "bias") if name in parts}

    def f(x, index, scale, shared):
        return gemv(x, dataclasses.replace(w, scale=scale), index=index, **shared, **parts)

    def grads(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 2, 3)))

    expected = grads(f)(x, index, w.scale, shared)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        cut, whole = P("data"), P()
        mapped = jax.shard_map(f, in_specs=(cut, cut, whole, whole), out_specs=cut, axis_names={"data"})
        args = (
            put(x, mesh, "data"),
            put(index, mesh, "data"),
            *jax.tree.map(lambda a: put(a, mesh), (w.scale, shared)),
        )
        for one, other in zip(jax.tree.leaves(grads(mapped)(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


def test_out_sharding(rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    mesh = mesh_of(AxisType.Explicit)
    args = put(p.x, mesh), put_weight(p.tensor, mesh, "model", None)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: gemv(x, w, activation="relu", out_sharding=P("data", None)))(*args)
    assert spec_of(y) == ("data", None)
    np.testing.assert_array_equal(y, np.maximum(p.answer() - p.bias, 0))


def test_no_collective_where_none_is_needed(rng):
    """N cut, and each device does its rows: bias, activation and residual send nothing."""
    p = make(rng, 4, "float32", CASE, exact=True)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        residual = put(rng.standard_normal((M, N)).astype(np.float32), mesh, None, "model")
        args = (
            put(p.x, mesh),
            put_weight(p.tensor, mesh, "model", None),
            put(np.ones(K, np.float32), mesh),
            residual,
        )
        with jax.set_mesh(mesh):
            f = jax.jit(
                lambda x, w, n, r: gemv(x, w, norm=n, activation="silu", residual=r, implementation="cpu")
            )
            assert collectives(f.lower(*args).compile()) == {}
