"""Explicit axes: the types of the operands tell while tracing how they lie, and the product becomes a shard_map."""

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgemv import _around
from jaxgemv._operands import Operands, Static
from jaxgemv._sharding.plan import Axes, Dims, axes_of_kind, dims_of, part, plan, spec_of


def wherever(product: Callable, o: Operands, s: Static, out_sharding=None) -> Array:
    """`product(o, s)`, where there are Explicit axes by a shard_map of it. product: on one device."""
    named = o.items()
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in named.values())]
    mesh = next(filter(_explicit, meshes), None)
    if mesh is None:
        if out_sharding is not None:
            raise ValueError(
                f"{s.op}: out_sharding must be None for operands without Explicit mesh axes; got {out_sharding}"
            )
        _check_arrays(named, s)
        return product(o, s)
    for name, a in named.items():
        other = jax.typeof(a).sharding.mesh
        if not other.empty and set(other.axis_types) == {AxisType.Auto}:
            # Its type tells no sharding: it would be gathered.
            raise ValueError(f"{s.op}: {name} must be on the mesh in use, {mesh}; got {other}")
    out = None if out_sharding is None else _check_out_sharding(s.op, out_sharding, mesh, o.x.ndim)
    return _over_mesh(o, product=product, s=s, mesh=mesh, out=out)


def _check_arrays(named: dict[str, Array], s: Static) -> None:
    """Outside jit Auto shardings can be refused at once, and not only by the compiler."""
    packed = named["packed"]
    sharding = None if isinstance(packed, Tracer) or not s.bits else packed.sharding
    if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
        held: dict[str, Dims] = {name: ((),) * a.ndim for name, a in named.items()}
        held["packed"] = dims_of(sharding.spec, packed.ndim)
        plan({name: a.shape for name, a in named.items()}, held, sharding.mesh.shape, s)


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


@partial(jax.jit, static_argnames=("product", "s", "mesh", "out"), inline=True)
def _over_mesh(o: Operands, *, product, s: Static, mesh, out) -> Array:
    """The product cut as its plan says, and the parts around it row by row: before it each device has all of K."""
    rest, inner, stack = None, s, None if o.index is None else o.stack
    if _around.has_parts(o, s):
        o, rest = _around.split(o)
        inner = _around.inner_static(o, rest, s)
        x = o.x
        if any(a is not None for a in (o.norm, o.perm, o.x_scale)):
            x = _by_rows(partial(_around.before, s=s), o, mesh)
        o = _around.inner_operands(o, x)
    y = _cut(o, product, inner, mesh)
    if rest is not None:
        y = _after(y, rest, s, stack, mesh)
    return y if out is None else jax.sharding.reshard(y, NamedSharding(mesh, out))


def _cut(o: Operands, product, s: Static, mesh) -> Array:
    named = o.items()
    shapes = {name: a.shape for name, a in named.items()}
    held = {name: _held(a) for name, a in named.items()}
    cut = plan(shapes, held, mesh.shape, s)
    # lax.axis_index would do, but jax 0.8 does not compile it inside nested shard_maps.
    numbers = [
        jnp.arange(prod(mesh.shape[a] for a in axes), dtype=jnp.int32) for axes in (cut.summed, cut.stack)
    ]

    def local(summed, stack, o):
        return part(product, o, s, cut, (summed[0], stack[0]))

    specs = spec_of((cut.summed,)), spec_of((cut.stack,)), _specs(cut.operands)
    return _mapped(local, (*numbers, o), specs, spec_of(cut.result), mesh)


def _by_rows(f: Callable[[Operands], Array], o: Operands, mesh) -> Array:
    """f(o) of the same shape as x, of which each device has whole rows, and all of what goes with them."""
    lead = _held(o.x)[:-1]
    o = Operands(x=o.x, packed=None, norm=o.norm, perm=o.perm, x_scale=o.x_scale, index=o.index)
    dims = {name: ((),) * a.ndim for name, a in o.items().items()}
    dims |= {"x": (*lead, ()), "x_scale": (*lead, ()), "index": lead[: o.prefix]}
    specs = _specs({name: dims[name] for name in o.items()})
    return _mapped(f, (o,), (specs,), spec_of((*lead, ())), mesh)


def _after(y: Array, rest: Operands, s: Static, stack: int | None, mesh) -> Array:
    """_around.after: y stays cut over N, unless its halves meet."""
    *lead, n = _held(y)
    gated = _around.is_gated(s.activation)
    own = () if gated else n
    dims = {"residual": (*lead, own), "x_scale": (*lead, ()), "index": tuple(lead[: rest.prefix])}
    for name, a in rest.items().items():
        by_row = a.ndim == 1 + (rest.index is not None) and a.shape[-1] > 1
        dims.setdefault(name, (*((),) * (a.ndim - 1), own) if by_row else ((),) * a.ndim)
    specs = _specs({name: dims[name] for name in rest.items()})
    spec = spec_of((*lead, own))
    after = partial(_around.after, s=s, stack=stack)
    y = _mapped(after, (y, rest), (spec, specs), spec, mesh)
    fits = y.shape[-1] % prod(mesh.shape[a] for a in n) == 0
    return jax.sharding.reshard(y, NamedSharding(mesh, spec_of((*lead, n)))) if gated and n and fits else y


def _mapped(f: Callable, args: tuple, specs: tuple, out: PartitionSpec, mesh) -> Array:
    """A shard_map of f, for which the arguments are resharded."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    if axes_of_kind(mesh, AxisType.Manual):
        # Differentiated inside another shard_map, f keeps its arguments alone: jax cannot bring out what it computes
        # from them.
        f = jax.checkpoint(f, prevent_cse=False)
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=specs,
        out_specs=out,
        # The empty set stands for all axes but those that another shard_map or a vmap has taken.
        axis_names=set(_explicit(mesh)) if axes_of_kind(mesh, AxisType.Auto) else set(),
    )
    return mapped(*jax.tree.map(jax.sharding.reshard, args, shardings))


def _is_spec(a) -> bool:
    return isinstance(a, PartitionSpec)


def _specs(dims: dict[str, Dims]) -> Operands:
    """Operands of PartitionSpecs."""
    return Operands(x=None, packed=None)._replace(**{name: spec_of(of) for name, of in dims.items()})


def _held(a: Array) -> Dims:
    return dims_of(jax.typeof(a).sharding.spec, a.ndim)


def batched(batch: Callable, args, dims) -> tuple[Array, int]:
    """`batch(args, dims)`; over a dimension that an Explicit axis cuts, each device batches its part by itself."""
    mapped = [(jax.typeof(a).sharding, d) for a, d in zip(args, dims) if d is not None]
    cuts = [(sharding.mesh, axes) for sharding, d in mapped if (axes := dims_of(sharding.spec, d + 1)[d])]
    if not cuts:
        return batch(args, dims)
    mesh, axes = cuts[0]

    def local(*args):
        y, dim = batch(args, dims)
        return jnp.moveaxis(y, dim, 0)

    own = spec_of((axes,))
    specs = tuple(spec_of(((),) * (d or 0) + ((axes,) if d is not None else ())) for d in dims)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=own, axis_names=set(axes))(*args), 0
