"""What each device does of a gemv_p, and for Auto axes its lowering, which leaves the cut to XLA's partitioner."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# The one private name: a lowering is told of the devices only if it asks here.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgemv import _primitive, _reference
from jaxgemv._ffi import backends
from jaxgemv._plan import Axes, Plan, held_by, plan, propagation_rule, spec_of
from jaxgemv._primitive import gemv_p


def part(named: dict[str, Array], cut: Plan, at: tuple, local: Callable, out_dtype, **params) -> Array:
    """What one device computes: the one whose parts of the sum and of the stack are number at[0] and at[1].

    `local` is the product on one device.
    """
    params |= {"group": cut.group, "k": cut.k}
    summed = (*cut.summed, *cut.stack)
    if not summed:
        return local(named, out_dtype=out_dtype, **params)
    if "bias" in named and cut.summed:
        # One device adds it for all.
        named = named | {"bias": jnp.where(at[0] == 0, named["bias"], 0)}
    index = named.get("index")
    first = at[1] * np.int32(cut.part)
    if index is not None:
        here = (index >= first) & (index < first + cut.part)
        named = named | {"index": jnp.where(here, index - first, np.int32(-1))}
    y = local(named, out_dtype=jnp.int32 if out_dtype == jnp.int32 else jnp.float32, **params)
    if index is None:
        y = lax.psum(y, summed)
    else:
        # What an index out of range gives is no number to be summed.
        y = lax.psum(_select(y, index, first, cut.part, 0), summed)
        bad = np.iinfo(np.int32).min if out_dtype == jnp.int32 else np.nan
        y = _select(y, index, np.int32(0), cut.entries, bad)
    return y.astype(out_dtype)


# Differentiated, it keeps the index alone: jax cannot bring arrays like the condition out of nested shard_maps.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _select(y: Array, index: Array, first, count: int, other) -> Array:
    """The slices of y whose index is one of `count` from `first` on, and `other` in place of the rest."""
    return _reference.select((index >= first) & (index < first + count), y, np.asarray(other, y.dtype))


def bind(named: dict[str, Array], **params) -> Array:
    """x varies over all manual axes that another operand varies over, as the rules of gemv_p take for granted."""
    x = named["x"]
    missing = frozenset().union(*map(_varying, named.values())) - _varying(x)
    if missing:
        axes = tuple(sorted(missing))
        x = (
            lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]  jax 0.8.0
        )
    named = named | {"x": x}
    return gemv_p.bind(*named.values(), names=tuple(named), **params)


def _varying(a: Array) -> frozenset:
    aval = jax.typeof(a)
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def axes_of_kind(mesh, kind: AxisType) -> Axes:
    return tuple(name for name, its in zip(mesh.axis_names, mesh.axis_types) if its == kind)


def _partitioned(names: tuple[str, ...], own: Mesh, whole: Mesh, **params) -> custom_partitioning:
    """gemv_p in the form that XLA's partitioner takes apart.

    own: the mesh that shardings speak of. whole: what the all-reduce does; more than `own` inside a shard_map that
    leaves one axis to the compiler.
    """

    def cut_of(args) -> Plan:
        shapes = {name: a.shape for name, a in zip(names, args)}
        held = {name: held_by(a.sharding, a.shape, own) for name, a in zip(names, args)}
        if held["packed"] is None:
            sharding = args[names.index("packed")].sharding
            raise ValueError(
                f"{params['op']}: the weight must be sharded by whole axes of the mesh; got {sharding}"
            )
        held = {name: dims or ((),) * len(shapes[name]) for name, dims in held.items()}
        return plan(shapes, held, own.shape, **{name: params[name] for name in ("op", "bits", "group", "k")})

    def partition(mesh, args, result):
        del mesh, result
        cut = cut_of(args)

        def body(*args):
            at = tuple(lax.axis_index(axes) if axes else np.int32(0) for axes in (cut.summed, cut.stack))
            return part(dict(zip(names, args)), cut, at, bind, **params)

        operands = tuple(NamedSharding(own, spec_of(cut.operands[name])) for name in names)
        parts = [jax.ShapeDtypeStruct(s.shard_shape(a.shape), a.dtype) for s, a in zip(operands, args)]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            jaxpr = jax.make_jaxpr(body, axis_env=list(whole.shape.items()))(*parts)
        result_sharding = NamedSharding(own, spec_of(cut.result))
        return whole, lambda *args: _part_p.bind(*args, jaxpr=jaxpr)[0], result_sharding, operands

    def infer(mesh, args, result):  # without Shardy
        del mesh, result
        try:
            return NamedSharding(own, spec_of(cut_of(args).result))
        except ValueError:  # would end the process here; `partition` can raise it
            return NamedSharding(own, PartitionSpec())

    call = custom_partitioning(lambda *args: gemv_p.bind(*args, names=names, **params))
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=lambda mesh, operands, results: propagation_rule(
            {name: tuple(t.shape) for name, t in zip(names, operands)}, transposed=params["k"] is not None
        ),
        decode_shardings=False,  # JAX knows the mesh in fewer cases than we do
    )
    return call


# What a device does, in the program that the partitioner makes for it. A primitive, because JAX traces that program
# under the user's jax.set_mesh: Explicit axes would leave marks in it, which come too late for the compiler.
_part_p = Primitive("jaxgemv_part")
_part_p.multiple_results = True
_part_p.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
_NO_MESH = AbstractMesh((), ())


def _lower_part(ctx, *args, jaxpr):
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        f = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
        return f(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)


mlir.register_lowering(_part_p, _lower_part)


def _lower(ctx, *args, platform: str | None, **params):
    """On one device, or where each has its part already: gemv_p as it is. Else by the partitioner."""
    context = ctx.module_context.axis_context
    whole = own = obstacle = None
    if hasattr(context, "mesh"):  # inside a shard_map, or called by the partitioner
        mesh = context.mesh
        manual = {*context.manual_axes, *axes_of_kind(ctx.avals_in[0].sharding.mesh, AxisType.Manual)}
        left = tuple(a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1)
        if len(left) > 1:
            # In what order they cut the partitioner does not tell.
            obstacle = f"shard_map leaves the mesh axes {', '.join(left)} to the compiler"
        elif left and isinstance(mesh, AbstractMesh):
            obstacle = (
                f"shard_map leaves the mesh axis {left[0]} to the compiler, and jax.set_mesh is not in use"
            )
        elif left:
            whole = mesh
            own = Mesh(mesh.devices[tuple(slice(None) if a in left else 0 for a in mesh.axis_names)], left)
    elif getattr(context, "num_devices", 1) > 1:
        whole = own = _mesh_of(context, params["op"])
    if obstacle or own is None or whole is None:
        return _primitive.lower(ctx, *args, platform=platform, obstacle=obstacle, **params)
    _primitive.why_reference(ctx.avals_in, platform, **params)
    call = _partitioned(own=own, whole=whole, **params)
    return mlir.lower_fun(call, multiple_results=False)(ctx, *args)


def _mesh_of(context, op: str) -> Mesh:
    """Of the program's NamedShardings, or else of jax.set_mesh; cut fine, as the compiler may use part of an axis."""
    for known in (context.abstract_mesh, jax.sharding.get_abstract_mesh()):
        if known is not None and known.size == context.num_devices:
            axes = {
                f"{name}{i}": factor
                for name, size in known.shape.items()
                for i, factor in enumerate(_prime_factors(size))
            }
            return Mesh(np.array(context.device_assignment).reshape(*axes.values()), tuple(axes))
    raise ValueError(
        f"{op}: on {context.num_devices} devices, one operand must have a NamedSharding, or jax.set_mesh be in use; "
        "got neither"
    )


def _prime_factors(n: int) -> tuple[int, ...]:
    p = next((p for p in range(2, n + 1) if n % p == 0), None)
    return () if p is None else (p, *_prime_factors(n // p))


prim_requires_devices_during_lowering.add(gemv_p)
mlir.register_lowering(gemv_p, partial(_lower, platform=None))
for _platform in backends:
    mlir.register_lowering(gemv_p, partial(_lower, platform=_platform), platform=_platform)
