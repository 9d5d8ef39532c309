"""gemv_p on several devices: which part of each array a device holds, and how the parts make the result.

The weight never moves. However its codes are sharded, over N, over K or over a stack, the other operands are brought
to where its parts lie: x its pieces of K, scale, zero, offset and bias their rows and groups. Parts of K or of a stack
give partial sums, which one all-reduce adds up in float32. In the transposed product N and K change places.

- Auto axes: only the compiler knows the shardings. gemv_p is lowered to a custom_partitioning, which it asks.
- Explicit axes: the types tell while tracing, and `product` binds gemv_p inside a shard_map.
- Manual axes (a user's shard_map): each device has its part already; gemv_p is what it is on one device.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.interpreters import batching
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgemv import _partition, _primitive, _reference
from jaxgemv._partition import axes_of_kind
from jaxgemv._plan import Axes, Dims, dims_of, plan, spec_of
from jaxgemv._primitive import gemv_p


def product(named: dict[str, Array], *, out_sharding=None, **params) -> Array:
    """gemv_p of named operands, wherever they lie."""
    return _wherever(_partition.bind, named, k=None, out_sharding=out_sharding, **params)


def dense_product(named: dict[str, Array], *, out_sharding=None, **params) -> Array:
    """The product with a dense weight "w", which XLA partitions itself unless axes are Explicit."""
    unused = {"bits": 0, "group": None, "k": None, "implementation": None}
    return _wherever(_dense, named, out_sharding=out_sharding, **unused, **params)


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
        _check_arrays(named, op=op, bits=params["bits"], group=params["group"], k=None)
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
    return axes_of_kind(mesh, AxisType.Explicit)


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
    static_argnames="names local mesh out op bits group k out_dtype implementation".split(),
    inline=True,
)
def _over_mesh(*args, names, local, mesh, out, **params):
    shapes = {name: a.shape for name, a in zip(names, args)}
    held = {name: dims_of(jax.typeof(a).sharding.spec, a.ndim) for name, a in zip(names, args)}
    cut = plan(shapes, held, mesh.shape, **{name: params[name] for name in ("op", "bits", "group", "k")})
    # lax.axis_index would do, but jax 0.8 does not compile it inside nested shard_maps.
    numbers = [
        jnp.arange(prod(mesh.shape[a] for a in axes), dtype=jnp.int32) for axes in (cut.summed, cut.stack)
    ]
    args = (*numbers, *args)
    specs = tuple(map(spec_of, ((cut.summed,), (cut.stack,), *(cut.operands[name] for name in names))))

    def part(summed, stack, *args):
        at = summed[0], stack[0]
        return _partition.part(dict(zip(names, args)), cut, at, local, **params)

    part = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=specs,
        out_specs=spec_of(cut.result),
        # None stands for all but those that another shard_map or a vmap has taken.
        axis_names=set(_explicit(mesh)) if axes_of_kind(mesh, AxisType.Auto) else set(),
    )
    y = part(*(jax.sharding.reshard(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)))
    return y if out is None else jax.sharding.reshard(y, NamedSharding(mesh, out))


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


batching.primitive_batchers[gemv_p] = _batch
