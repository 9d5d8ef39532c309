"""Auto axes on meshes of every kind, on one device, and with the partitioner of old."""

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import CASE, collectives, mesh_of, moved_codes, put, put_weight, spec_of

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, gemv, gemv_int4


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(AxisType.Auto)


def constrained(w, mesh, spec):
    """Inside jit: the codes by `spec`, every parameter by as much of it as it has dimensions."""
    return jax.tree.map(
        lambda a: jax.lax.with_sharding_constraint(a, jax.NamedSharding(mesh, P(*spec[: a.ndim]))), w
    )


def test_outside_jit(mesh, rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    w = put_weight(p.tensor, mesh, None, "model")
    np.testing.assert_array_equal(gemv(put(p.x, mesh, "data"), w), p.answer() - p.bias)


def test_under_set_mesh(mesh, rng):
    p = make(rng, 4, "float32", CASE, exact=True)

    @jax.jit
    def f(x, w):
        w = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, P("model")), w)
        return gemv(x, w)

    with jax.set_mesh(mesh):
        y = f(p.x, p.tensor)
    np.testing.assert_array_equal(y, p.answer() - p.bias)
    assert spec_of(y) == (None, "model")


def test_ragged(mesh, rng):
    """Rows of any length are sharded over N; an N that is no multiple cannot be cut, and is whole everywhere."""
    p = make(rng, 3, "float32", Case(2, 16, 77, 16, "fraction", bias=True), exact=True)
    w = put_weight(p.tensor, mesh, "model", None)
    y = jax.jit(lambda x, w: gemv(x, w, bias=p.bias))(p.x, w)
    np.testing.assert_array_equal(y, p.answer())
    odd = make(rng, 4, "float32", Case(2, 9, 64, 16), exact=True)
    y = jax.jit(gemv)(put(odd.x, mesh, "data"), put_weight(odd.tensor, mesh))
    np.testing.assert_array_equal(y, odd.answer())


@pytest.mark.parametrize(("n", "k"), [(1, 64), (8, 1), (8, 8), (1, 1)])
def test_dimensions_of_one(mesh, n, k, rng):
    """They are cut by nothing, and like nothing else."""
    p = make(rng, 4, "float32", Case(1, n, k, "row", "zero"), exact=True)
    w = put_weight(p.tensor, mesh, "model" if n > 1 else None, None)
    np.testing.assert_array_equal(jax.jit(gemv)(put(p.x, mesh), w), p.answer())
    x = np.concatenate([p.x, p.x])
    stacked = jax.tree.map(lambda a: put(a[None], mesh), w)
    y = jax.jit(lambda x, w: gemv(x, w, index=np.zeros(2, np.int32)))(put(x, mesh, "data"), stacked)
    np.testing.assert_array_equal(y, np.concatenate([p.answer(), p.answer()]))


def test_shardings_made_inside(mesh, rng):
    """The mesh is known from the shardings alone, whatever their order of axes."""
    p = make(rng, 4, "float32", CASE, exact=True)
    for spec in (("model", "data"), (("model", "data"), None), (None, ("data", "model"))):
        f = jax.jit(lambda x, w, spec=spec: gemv(x, constrained(w, mesh, spec)))
        np.testing.assert_array_equal(f(p.x, p.tensor), p.answer() - p.bias)


def test_part_of_an_axis(rng):
    """A reshape leaves the compiler with shardings over part of an axis; the weight still stays where it is."""
    mesh = mesh_of(AxisType.Auto, (8,), ("all",))
    p = make(rng, 4, "float32", Case(16, 16, 512, 64, "zero"), exact=True)
    x, w = put(p.x, mesh, "all"), put_weight(p.tensor, mesh)
    f = jax.jit(lambda x, w: gemv(x.reshape(4, 4, 512), w).reshape(16, 16))
    compiled = f.lower(x, w).compile()
    assert collectives(compiled) == {}
    np.testing.assert_array_equal(compiled(x, w), p.answer())

    x, w = put(p.x, mesh), put_weight(p.tensor, mesh, "all", None)
    f = jax.jit(lambda x, w: jax.vmap(gemv, (None, 0))(x, jax.tree.map(lambda a: a.reshape(4, 4, -1), w)))
    compiled = f.lower(x, w).compile()
    assert moved_codes(compiled) == []
    np.testing.assert_array_equal(compiled(x, w), np.moveaxis(p.answer().reshape(16, 4, 4), 1, 0))


def test_meshes_of_six(rng):
    p = make(rng, 4, "float32", Case(6, 24, 768, 64, "zero"), exact=True)
    mesh = jax.make_mesh((3, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:6])
    for spec in (("a", None), (None, "b"), ("a", "b"), (None, ("b", "a"))):
        w = put_weight(p.tensor, mesh, *spec)
        np.testing.assert_array_equal(jax.jit(gemv)(p.x, w), p.answer())
        made_inside = jax.jit(lambda x, w, spec=spec: gemv(x, constrained(w, mesh, spec)))
        np.testing.assert_array_equal(made_inside(p.x, p.tensor), p.answer())


def test_any_order_of_devices(rng):
    p = make(rng, 4, "float32", CASE, exact=True)
    devices = [jax.devices("cpu")[i] for i in (5, 2, 7, 0)]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    y = jax.jit(gemv)(put(p.x, mesh), put_weight(p.tensor, mesh, "b", "a"))
    np.testing.assert_array_equal(y, p.answer() - p.bias)


def test_without_shardy(mesh, rng):
    """The partitioner that was the default before jax 0.7."""
    p = make(rng, 4, "float32", CASE, exact=True)
    bad = make(rng, 4, "float32", Case(2, 8, 512, 256))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for spec, expected in ((("model", None), {}), ((None, "model"), {"all-reduce": 1})):
            w = put_weight(p.tensor, mesh, *spec)
            compiled = jax.jit(gemv).lower(put(p.x, mesh), w).compile()
            assert collectives(compiled) == expected
            np.testing.assert_array_equal(compiled(put(p.x, mesh), w), p.answer() - p.bias)
        packed = put(bad.packed, mesh, None, "model")
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"gemv: w\.packed must be sharded along K"):
            jax.jit(gemv)(put(bad.x, mesh), QuantizedTensor(packed=packed, scale=bad.scale, bits=4))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_one_device_has_no_partitioner(mesh, rng):
    """Such a program can be exported and cached, which one with a partitioner cannot."""
    p = make(rng, 4, "float32", CASE, exact=True)
    f = jax.jit(lambda x, packed, scale, zero: gemv_int4(x, packed, zero, scale))
    w = p.tensor
    assert "CustomSPMDPartitioning" not in f.lower(p.x, w.packed, w.scale, w.zero).as_text()
    w = put_weight(w, mesh, "model", None)
    args = put(p.x, mesh), w.packed, w.scale, w.zero
    assert "CustomSPMDPartitioning" in f.lower(*args).as_text()
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        jax.export.export(f, platforms=("cpu",), disabled_checks=EXPORT_CHECKS)(*args).serialize()


def test_pmap(rng):
    p = make(rng, 4, "float32", Case(8, 16, 512, 64, "zero"), exact=True)
    y = jax.pmap(lambda x: gemv(x, p.tensor), devices=jax.devices("cpu")[:8])(p.x)
    np.testing.assert_array_equal(y, p.answer())
