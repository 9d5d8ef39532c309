"""Auto axes: the lowering of gemv_p on several devices, which leaves the cut to XLA's partitioner."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array, lax

# The one private name: a lowering is told of the devices only if it asks here.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgemv._operands import Operands, Static
from jaxgemv._sharding.plan import Plan, axes_of_kind, held_by, part, plan, spec_of

# A product of Operands and Static on one device.
Product = Callable[[Operands, Static], Array]

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:  # the same, without an import that brings in Pallas and takes longer than all of ours
    Primitive = type(lax.add_p)


def tell_of_devices(primitive: Primitive) -> None:
    prim_requires_devices_during_lowering.add(primitive)


def meshes(ctx, s: Static) -> tuple[Mesh | None, Mesh | None, str | None]:
    """(the mesh that shardings speak of, the one that the all-reduce does, what is in the way of either)

    None and None on one device, or where each has its part already. The second is more than the first inside a
    shard_map that leaves one axis to the compiler.
    """
    context = ctx.module_context.axis_context
    if not hasattr(context, "mesh"):
        several = getattr(context, "num_devices", 1) > 1
        mesh = _mesh_of(context, s.op) if several else None
        return mesh, mesh, None
    # Inside a shard_map, or called by the partitioner.
    mesh = context.mesh
    manual = {*context.manual_axes, *axes_of_kind(ctx.avals_in[0].sharding.mesh, AxisType.Manual)}
    left = tuple(a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1)
    if not left:
        return None, None, None
    if len(left) > 1:
        # The partitioner does not tell in what order they cut.
        return None, None, f"shard_map leaves the mesh axes {', '.join(left)} to the compiler"
    if isinstance(mesh, AbstractMesh):
        left = f"the mesh axis {''.join(left)}"
        return None, None, f"shard_map leaves {left} to the compiler, and jax.set_mesh is not in use"
    devices = mesh.devices[tuple(slice(None) if a in left else 0 for a in mesh.axis_names)]
    return Mesh(devices, left), mesh, None


def partitioned(product: Product, tree, s: Static, own: Mesh, whole: Mesh) -> custom_partitioning:
    """The product of the leaves of Operands, in the form that XLA's partitioner takes apart; for the meshes above."""

    def cut_of(args) -> Plan:
        named = tree.unflatten(args).items()
        shapes = {name: a.shape for name, a in named.items()}
        held = {name: held_by(a.sharding, a.shape, own) for name, a in named.items()}
        if held["packed"] is None:
            sharding = named["packed"].sharding
            raise ValueError(f"{s.op}: the weight must be sharded by whole axes of the mesh; got {sharding}")
        held = {name: dims or ((),) * len(shapes[name]) for name, dims in held.items()}
        return plan(shapes, held, own.shape, s)

    def partition(mesh, args, result):
        del mesh, result
        cut = cut_of(args)

        def body(*args):
            at = tuple(lax.axis_index(axes) if axes else np.int32(0) for axes in (cut.summed, cut.stack))
            return part(product, tree.unflatten(args), s, cut, at)

        operands = tuple(NamedSharding(own, spec_of(dims)) for dims in cut.operands.values())
        parts = [jax.ShapeDtypeStruct(of.shard_shape(a.shape), a.dtype) for of, a in zip(operands, args)]
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

    def rule(mesh, operands, results):
        del mesh, results
        named = tree.unflatten(operands).items()
        return _propagation_rule({name: tuple(t.shape) for name, t in named.items()}, s)

    call = custom_partitioning(lambda *args: product(tree.unflatten(args), s))
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        decode_shardings=False,  # JAX knows the mesh in fewer cases than we do
    )
    return call


def _propagation_rule(shapes: Mapping[str, tuple[int, ...]], s: Static) -> SdyShardingRule:
    """Which dimensions are cut alike, for the propagation of shardings."""
    summed, kept = ("k", "n") if s.k is None else ("n", "k")
    stacked = ("s",) if "index" in shapes else ()
    lead = tuple(f"l{i}" for i in range(len(shapes["x"]) - 1))
    dims = {
        "x": (*lead, summed),
        "index": lead,
        "packed": (*stacked, "n", "k"),
        "codebook": (*stacked, "codes"),
    }
    factors = {
        # A dimension of size 1 has a factor of its own: it is not cut with others.
        name: tuple(
            factor if size > 1 else f"{name}{i}"
            for i, (factor, size) in enumerate(zip(dims.get(name, (*stacked, "n", f"{name}groups")), shape))
        )
        for name, shape in shapes.items()
    }
    # In the order in which they come, which is how factors are numbered.
    sums = dict.fromkeys(factor for of in factors.values() for factor in of if factor in (summed, "s"))
    return SdyShardingRule(
        tuple(ArrayMapping(*of) for of in factors.values()),
        (ArrayMapping(*lead, kept),),
        reduction_factors=tuple(sums),
    )


# What a device does, in the program that the partitioner makes for it. A primitive, because JAX traces that program
# under the user's jax.set_mesh: Explicit axes would leave marks in it, which come too late for the compiler.
_part_p = Primitive("jaxgemv_part")
_part_p.multiple_results = True
_part_p.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
_NO_MESH = AbstractMesh((), ())


def _lower_part(ctx, *args, jaxpr):
    from jax.extend.core import jaxpr_as_fun

    with jax.sharding.use_abstract_mesh(_NO_MESH):
        f = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
        return f(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)


mlir.register_lowering(_part_p, _lower_part)


def _mesh_of(context, op: str) -> Mesh:
    """That of the program's NamedShardings, or of jax.set_mesh; axes in prime factors, as XLA may use part of one."""
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
