"""How to cut a product over a mesh of devices, what a device then does, and what shardings say in terms of its axes.

The weight stays as it is cut; everything else is decided from it.
"""

from collections.abc import Callable, Mapping
from math import gcd, lcm, prod
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgemv._operands import Operands, Static, select

Axes = tuple[str, ...]  # of the mesh, for one dimension of an array; () where it is not cut
Dims = tuple[Axes, ...]


class Plan(NamedTuple):
    """How to cut the operands and the result, and what the parts of the weight are like.

    summed: the axes that cut the dimension that the product sums over, K or, transposed, N. k: a part's, for Static.
    """

    operands: dict[str, Dims]
    result: Dims
    summed: Axes
    group: int | None
    k: int | None
    stack: Axes
    entries: int  # of the whole stack
    part: int  # of them on one device


def plan(
    shapes: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Dims],
    sizes: Mapping[str, int],
    s: Static,
) -> Plan:
    """How to cut operands that come cut as in `held`, by name, over a mesh of these sizes.

    Raises ValueError where a part of K would not be whole words and whole groups.
    """

    def even(axes: Axes, dim: int) -> Axes:
        return axes if dim % prod(sizes[a] for a in axes) == 0 else ()

    stacked = "index" in shapes
    *stack, n = map(even, held["packed"][:-1], shapes["packed"][:-1])
    words = held["packed"][-1]
    # Parameters with one group for the whole row go with every part of it.
    grouped = any(
        len(shapes[name]) == stacked + 2 and shapes[name][-1] > 1
        for name in ("scale", "zero", "offset")
        if name in shapes
    )
    group = s.group if grouped else None
    parts = prod(sizes[a] for a in words)
    _check_parts(s.k or shapes["x"][-1], parts, s, group)

    summed, kept = (words, n) if s.k is None else (n, words)
    taken = {a for axes in (*stack, n, words) for a in axes}
    lead = tuple(
        even(axes, dim) if taken.isdisjoint(axes) else () for axes, dim in zip(held["x"][:-1], shapes["x"])
    )
    cuts = {"x": (*lead, summed), "index": lead[: len(shapes.get("index", ()))], "codebook": (*stack, ())}
    operands = {}
    for name, shape in shapes.items():
        cut = cuts.get(name, (*stack, n, words))
        # An array may have fewer dimensions than the weight, and one entry for all.
        operands[name] = tuple(axes if dim > 1 else () for axes, dim in zip(cut, shape))
    entries = max(shape[0] for name, shape in shapes.items() if name not in ("x", "index")) if stacked else 1
    over = stack[0] if stacked else ()
    part = entries // prod(sizes[a] for a in over)
    return Plan(operands, (*lead, kept), summed, group, s.k and s.k // parts, over, entries, part)


def _check_parts(k: int, parts: int, s: Static, group: int | None) -> None:
    unit = lcm(32 // gcd(s.bits, 32), group or 1)
    if parts == 1 or k % (parts * unit) == 0:
        return
    name = "w.packed" if s.op == "gemv" else "Wq"
    possible = [p for p in range(1, k // unit + 1) if k % (p * unit) == 0] or [1]
    devices = f"{' or '.join(map(str, possible))} device{'s' * (possible != [1])}"
    raise ValueError(
        f"{s.op}: {name} must be sharded along K in whole words and groups, multiples of {unit} codes: "
        f"for K = {k} over {devices}; got {parts}"
    )


def part(product: Callable, o: Operands, s: Static, cut: Plan, at: tuple) -> Array:
    """What one device computes of its parts of the operands, by `product`, a product of Operands and Static.

    at: its number among the devices that add up one sum, of which number 0 adds the bias; and among those that hold
    parts of one stack, which says which entries it has.
    """
    of_part = s._replace(group=cut.group, k=cut.k)
    summed = (*cut.summed, *cut.stack)
    if not summed:
        return product(o, of_part)
    if o.bias is not None and cut.summed:
        # One device adds it for all.
        o = o._replace(bias=jnp.where(at[0] == 0, o.bias, 0))
    index = o.index
    first = at[1] * np.int32(cut.part)
    if index is not None:
        here = (index >= first) & (index < first + cut.part)
        o = o._replace(index=jnp.where(here, index - first, np.int32(-1)))
        of_part = of_part._replace(entry=None)
    exact = s.out_dtype == jnp.int32
    y = product(o, of_part._replace(out_dtype=jnp.dtype(jnp.int32 if exact else jnp.float32)))
    if index is None:
        y = lax.psum(y, summed)
    else:
        # An index out of range gives NaN or the least integer, which must not go into the sum.
        y = lax.psum(_select(y, index, first, cut.part, 0), summed)
        bad = np.iinfo(np.int32).min if exact else np.nan
        y = _select(y, index, np.int32(0), cut.entries, bad)
    return y.astype(s.out_dtype)


def _select(y: Array, index: Array, first, count: int, other) -> Array:
    """The slices of y whose index is one of `count` from `first` on, and `other` in place of the rest."""
    return select((index >= first) & (index < first + count), y, other)


def axes_of_kind(mesh, kind: AxisType) -> Axes:
    return tuple(name for name, its in zip(mesh.axis_names, mesh.axis_types) if its == kind)


def dims_of(spec: PartitionSpec, ndim: int) -> Dims:
    """A PartitionSpec with one entry a dimension, each a tuple."""
    dims = (() if d is None else d if isinstance(d, tuple) else (d,) for d in spec)
    return (*dims, *((),) * (ndim - len(spec)))


def spec_of(dims: Dims) -> PartitionSpec:
    """The reverse of `dims_of`."""
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in dims))


def held_by(sharding, shape: tuple[int, ...], mesh: Mesh) -> Dims | None:
    """The axes that cut each dimension, told from what each device holds; None where whole axes do not tell it."""
    if sharding is None:
        return ((),) * len(shape)
    if len(mesh.axis_names) == 1:
        # Shardings of groups of devices, which a shard_map makes, say no more than the size of parts.
        parts = [size // part for size, part in zip(shape, sharding.shard_shape(shape))]
        dims = tuple(mesh.axis_names if parts > 1 else () for parts in parts)
        return dims if set(parts) <= {1, mesh.size} else None
    index = sharding.devices_indices_map(shape)
    steps = np.eye(mesh.devices.ndim, dtype=int)
    neighbours = {a: index[mesh.devices[tuple(i)]] for a, i in zip(mesh.axis_names, steps)}
    starts = [{a: i[d].start or 0 for a, i in neighbours.items()} for d in range(len(shape))]
    # The axis whose step leads farthest is the major one.
    dims = tuple(
        tuple(sorted(filter(start.get, start), key=start.__getitem__, reverse=True)) for start in starts
    )
    return dims if NamedSharding(mesh, spec_of(dims)).is_equivalent_to(sharding, len(shape)) else None
