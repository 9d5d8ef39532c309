"""Shardings that cannot be: refused with the operation, the argument, what is expected and what there is."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import mesh_of, put, put_weight

import jaxgemv
from jaxgemv import QuantizedTensor, gemv, gemv_int4
from jaxgemv._sharding import auto, plan


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def mesh(request):
    return mesh_of(request.param)


@pytest.fixture
def explicit():
    return mesh_of(AxisType.Explicit)


def check(text, f, *args, error=ValueError, compiled=False):
    """While tracing, and outside jit at once; in jit over Auto axes by the compiler, whose exception it then is."""
    for call in (f, jax.jit(f)):
        late = compiled and call is not f
        with pytest.raises(jax.errors.JaxRuntimeError if late else error, match=re.escape(text)):
            call(*args)


# Bits, case, and what a part of K would have to be. JAX refuses by itself what does not divide the words.
SPLITS = {
    "word": (
        4,
        Case(2, 8, 16, "row", bytes=True),
        "multiples of 8 codes: for K = 16 over 1 or 2 devices; got 4",
    ),
    "code": (
        3,
        Case(2, 8, 64, "row", bytes=True),
        "multiples of 32 codes: for K = 64 over 1 or 2 devices; got 4",
    ),
    "last word": (3, Case(2, 8, 120, "row"), "multiples of 32 codes: for K = 120 over 1 device; got 4"),
    "group": (4, Case(2, 8, 512, 256), "multiples of 256 codes: for K = 512 over 1 or 2 devices; got 4"),
    "last group": (4, Case(2, 8, 320, 96), "multiples of 96 codes: for K = 320 over 1 device; got 4"),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("op", ["gemv", "gemv_int"])
def test_parts_of_k(mesh, split, op, rng):
    """Cut through a word, a code or a group."""
    bits, case, text = SPLITS[split]
    p = make(rng, bits, "float32", case)
    static = {"bits": bits, "group_size": p.tensor.group_size, "k": p.tensor.k}

    def f(x, packed, scale):
        if op == "gemv":
            return gemv(x, QuantizedTensor(packed=packed, scale=scale, **static))
        return getattr(jaxgemv, f"gemv_int{bits}")(x, packed, None, scale, group_size=static["group_size"])

    name = "gemv: w.packed" if op == "gemv" else f"gemv_int{bits}: Wq"
    text = f"{name} must be sharded along K in whole words and groups, {text}"
    args = put(p.x, mesh), put(p.packed, mesh, None, "model"), put(p.scale, mesh)
    check(text, f, *args, compiled=mesh.axis_types[0] == AxisType.Auto)


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (P("nope"), ValueError, "must use Explicit axes of the mesh, data, model; got "),
        (P(None, ("model", "nope")), ValueError, "must use Explicit axes of the mesh, data, model; got "),
        (P(None, None, "data"), ValueError, "must have at most 2 entries, one a dimension; got "),
        ("data", TypeError, "must be a PartitionSpec or a NamedSharding; got 'data'"),
    ],
    ids=str,
)
def test_out_sharding(explicit, out, error, text, rng):
    p = make(rng, 4, "float32", Case(2, 8, 64, "row"))
    x, w = put(p.x, explicit), put_weight(p.tensor, explicit, "model", None)
    check(f"gemv: out_sharding {text}", lambda x, w: gemv(x, w, out_sharding=out), x, w, error=error)


def test_out_sharding_of_another_mesh(explicit, rng):
    p = make(rng, 4, "float32", Case(2, 8, 64, "row"))
    other = mesh_of(AxisType.Explicit, (8,), ("all",))
    x, w = put(p.x, explicit), put_weight(p.tensor, explicit, "model", None)
    text = "gemv: out_sharding must use Explicit axes of the mesh, data, model; got "
    check(text, lambda x, w: gemv(x, w, out_sharding=NamedSharding(other, P("all"))), x, w)


@pytest.mark.parametrize("place", [None, AxisType.Auto])
def test_out_sharding_without_explicit_axes(place, rng):
    """There the compiler places results; jax.lax.with_sharding_constraint has a say."""
    p = make(rng, 4, "float32", Case(2, 8, 64, "row"))
    x, w = p.x, p.tensor
    if place:
        x, w = put(x, mesh_of(place)), put_weight(w, mesh_of(place), "model", None)
    text = "gemv: out_sharding must be None for operands without Explicit mesh axes; got "
    check(text, lambda x, w: gemv(x, w, out_sharding=P("model")), x, w)


def test_two_meshes(explicit, rng):
    """A weight over Auto axes has a type without a sharding; beside Explicit ones it would be gathered."""
    p = make(rng, 4, "float32", Case(2, 8, 64, "row"))
    w = put_weight(p.tensor, mesh_of(AxisType.Auto), "model", None)
    check("gemv: packed must be on the mesh in use, ", gemv, put(p.x, explicit), w)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="mesh"):  # some versions of JAX say it first
        jax.jit(gemv)(p.x, w)


def test_inside_shard_map(mesh, rng):
    """Parts are checked as wholes are: a part of x and a part of the codes that do not belong together."""
    p = make(rng, 4, "float32", Case(2, 8, 512, 256))
    f = jax.shard_map(
        gemv_int4, mesh=mesh, in_specs=(P(), P(None, "model"), None, P()), out_specs=P(), check_vma=False
    )
    args = put(p.x, mesh), put(p.packed, mesh, None, "model"), None, put(p.scale, mesh)
    check("gemv_int4: Wq must have shape (N, 64) for x with K = 512; got (8, 16)", f, *args)


def test_no_mesh():
    """Shardings of unknown meshes are not guessed at."""
    context = SimpleNamespace(abstract_mesh=None, num_devices=8)
    text = "gemv: on 8 devices, one operand must have a NamedSharding, or jax.set_mesh be in use; got neither"
    with pytest.raises(ValueError, match=re.escape(text)):
        auto._mesh_of(context, "gemv")


def test_shardings_that_axes_do_not_tell():
    devices = np.array(jax.devices("cpu")[:8])
    mesh = Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))
    shape = (16, 8)
    for spec in (P(("b", "a"), "c"), P("c", "a"), P(None, ("a", "b", "c"))):
        dims = plan.dims_of(spec, 2)
        assert plan.held_by(NamedSharding(mesh, spec), shape, mesh) == dims
    other = NamedSharding(Mesh(devices[[0, 3, 1, 2, 4, 5, 6, 7]], ("x",)), P("x"))
    assert plan.held_by(other, shape, mesh) is None
    # Of one axis only the parts are known.
    one = Mesh(devices, ("x",))
    assert plan.held_by(NamedSharding(one, P(None, "x")), shape, one) == ((), ("x",))
    assert plan.held_by(NamedSharding(mesh, P("a")), shape, one) is None
