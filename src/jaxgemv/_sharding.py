"""gemv_p on several devices: which part of each array a device holds, and how the parts make the result.

The weight never moves. However its codes are sharded, over N, over K or over a stack, the other operands are brought
to where its parts lie: x its pieces of K, scale, zero, offset and bias their rows and groups. Parts of K or of a stack
give partial sums, which one all-reduce adds up in float32.

- Auto axes: only the compiler knows the shardings. gemv_p is lowered to a custom_partitioning, which it asks.
- Explicit axes: the types tell while tracing, and `product` binds gemv_p inside a shard_map.
- Manual axes (a user's shard_map): each device has its part already; gemv_p is what it is on one device.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# The one private name: a lowering is told of the devices only if it asks here.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgemv import _primitive, _reference
from jaxgemv._ffi import backends
from jaxgemv._plan import Axes, Dims, Plan, dims_of, held_by, plan, propagation_rule, spec_of
from jaxgemv._primitive import gemv_p


def _part(named: dict[str, Array], cut: Plan, at: tuple, local: Callable, out_dtype, **params) -> Array:
    """What one device computes: the one whose parts of K and of the stack are number at[0] and at[1].

    `local` is the product on one device.
    """
    params["group"] = cut.group
    summed = (*cut.k, *cut.stack)
    if not summed:
        return local(named, out_dtype=out_dtype, **params)
    if "bias" in named and cut.k:
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
    valid = (index >= first) & (index < first + count)
    return jnp.where(
        valid.reshape(*valid.shape, *(1,) * (y.ndim - valid.ndim)), y, np.asarray(other, y.dtype)
    )


def product(named: dict[str, Array], *, out_sharding=None, **params) -> Array:
    """gemv_p of named operands, wherever they lie."""
    return _wherever(_bind, named, out_sharding=out_sharding, **params)


def dense_product(named: dict[str, Array], *, out_sharding=None, **params) -> Array:
    """The product with a dense weight "w", which XLA partitions itself unless axes are Explicit."""
    return _wherever(
        _dense, named, bits=0, group=None, implementation=None, out_sharding=out_sharding, **params
    )


def _dense(named: dict[str, Array], *, out_dtype, **params) -> Array:
    del params
    return _reference.dense_product(**named, out_dtype=out_dtype)


def _wherever(local: Callable, named: dict[str, Array], *, op: str, out_sharding=None, **params) -> Array:
    """`local(named, ...)`, where there are Explicit axes by a shard_map of it."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in named.values())]
    mesh = next(filter(_explicit, meshes), None)
    if mesh is None:
        if out_sharding is not None:
            raise ValueError(
                f"{op}: out_sharding must be None for operands without Explicit mesh axes; got {out_sharding}"
            )
        _check_arrays(named, op=op, bits=params["bits"], group=params["group"])
        return local(named, op=op, **params)
    for name, a in named.items():
        other = jax.typeof(a).sharding.mesh
        if not other.empty and set(other.axis_types) == {AxisType.Auto}:
            # Its type tells no sharding: it would be gathered.
            raise ValueError(f"{op}: {name} must be on the mesh in use, {mesh}; got {other}")
    ndim = named["x"].ndim
    out = None if out_sharding is None else _check_out_sharding(op, out_sharding, mesh, ndim)
    return _over_mesh(*named.values(), names=tuple(named), local=local, mesh=mesh, out=out, op=op, **params)


def _check_arrays(named: dict[str, Array], **params) -> None:
    """Outside jit Auto shardings can be refused at once, and not only by the compiler."""
    sharding = None
    if "packed" in named and not isinstance(named["packed"], Tracer):
        sharding = named["packed"].sharding
    if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
        held: dict[str, Dims] = {name: ((),) * a.ndim for name, a in named.items()}
        held["packed"] = dims_of(sharding.spec, named["packed"].ndim)
        plan({name: a.shape for name, a in named.items()}, held, sharding.mesh.shape, **params)


def _explicit(mesh) -> Axes:
    return _axes_of_kind(mesh, AxisType.Explicit)


def _axes_of_kind(mesh, kind: AxisType) -> Axes:
    return tuple(name for name, its in zip(mesh.axis_names, mesh.axis_types) if its == kind)


def _check_out_sharding(op: str, out_sharding, mesh, ndim: int) -> PartitionSpec:
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{op}: out_sharding must be a PartitionSpec or a NamedSharding; got {out_sharding!r}"
        )
    if len(spec) > ndim:
        raise ValueError(f"{op}: out_sharding must have at most {ndim} entries, one a dimension; got {spec}")
    axes = {a for dim in dims_of(spec, ndim) for a in dim}
    if not axes <= set(_explicit(mesh)):
        raise ValueError(
            f"{op}: out_sharding must use Explicit axes of the mesh, {', '.join(_explicit(mesh))}; got {spec}"
        )
    return spec


@partial(
    jax.jit,
    static_argnames="names local mesh out op bits group out_dtype implementation".split(),
    inline=True,
)
def _over_mesh(*args, names, local, mesh, out, **params):
    shapes = {name: a.shape for name, a in zip(names, args)}
    held = {name: dims_of(jax.typeof(a).sharding.spec, a.ndim) for name, a in zip(names, args)}
    cut = plan(shapes, held, mesh.shape, **{name: params[name] for name in ("op", "bits", "group")})
    # lax.axis_index would do, but jax 0.8 does not compile it inside nested shard_maps.
    numbers = [jnp.arange(prod(mesh.shape[a] for a in axes), dtype=jnp.int32) for axes in (cut.k, cut.stack)]
    args = (*numbers, *args)
    specs = tuple(map(spec_of, ((cut.k,), (cut.stack,), *(cut.operands[name] for name in names))))

    def part(k, stack, *args):
        return _part(dict(zip(names, args)), cut, (k[0], stack[0]), local, **params)

    part = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=specs,
        out_specs=spec_of(cut.result),
        # None stands for all but those that another shard_map or a vmap has taken.
        axis_names=set(_explicit(mesh)) if _axes_of_kind(mesh, AxisType.Auto) else set(),
    )
    y = part(*(jax.sharding.reshard(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)))
    return y if out is None else jax.sharding.reshard(y, NamedSharding(mesh, out))


def _bind(named: dict[str, Array], **params) -> Array:
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


def _batch(args, dims, **params):
    """Over a dimension that an Explicit axis cuts, each device batches its part, with no word to the others."""
    mapped = [(jax.typeof(a).sharding, d) for a, d in zip(args, dims) if d is not None]
    cuts = [(sharding.mesh, axes) for sharding, d in mapped if (axes := dims_of(sharding.spec, d + 1)[d])]
    if not cuts:
        return _primitive.batch(args, dims, **params)
    mesh, axes = cuts[0]

    def part(*args):
        y, dim = _primitive.batch(args, dims, **params)
        return jnp.moveaxis(y, dim, 0)

    own = spec_of((axes,))
    specs = tuple(spec_of(((),) * (d or 0) + ((axes,) if d is not None else ())) for d in dims)
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=own, axis_names=set(axes))(*args), 0


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
        return plan(shapes, held, own.shape, **{name: params[name] for name in ("op", "bits", "group")})

    def partition(mesh, args, result):
        del mesh, result
        cut = cut_of(args)

        def body(*args):
            at = tuple(lax.axis_index(axes) if axes else np.int32(0) for axes in (cut.k, cut.stack))
            return _part(dict(zip(names, args)), cut, at, _bind, **params)

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
            {name: tuple(t.shape) for name, t in zip(names, operands)}
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
        manual = {*context.manual_axes, *_axes_of_kind(ctx.avals_in[0].sharding.mesh, AxisType.Manual)}
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


batching.primitive_batchers[gemv_p] = _batch
prim_requires_devices_during_lowering.add(gemv_p)
mlir.register_lowering(gemv_p, partial(_lower, platform=None))
for _platform in backends:
    mlir.register_lowering(gemv_p, partial(_lower, platform=_platform), platform=_platform)
