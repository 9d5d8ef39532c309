"""How to cut a product over a mesh of devices, and what shardings say in terms of its axes.

The weight stays as it is cut; everything else is decided from it.
"""

from collections.abc import Mapping
from math import gcd, lcm, prod
from typing import NamedTuple

import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]  # of the mesh, for one dimension of an array; () where it is not cut
Dims = tuple[Axes, ...]


class Plan(NamedTuple):
    """How to cut the operands and the result, and what the parts of the weight are like.

    summed: what cuts the dimension that the product sums over, K or, transposed, N. k: gemv_p's, of a part.
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
    *,
    op: str,
    bits: int,
    group: int | None,
    k: int | None,
) -> Plan:
    """How to cut operands that come cut as in `held` over a mesh of these sizes.

    Raises ValueError where a part of K would not be whole words and whole groups.
    """

    def even(axes: Axes, dim: int) -> Axes:
        return axes if dim % prod(sizes[a] for a in axes) == 0 else ()

    stacked = "index" in shapes
    matrix = "packed" if "packed" in shapes else "w"
    *stack, n = map(even, held[matrix][:-1], shapes[matrix][:-1])
    words = held[matrix][-1]
    # Parameters with one group for the whole row go with every part of it.
    grouped = any(
        len(shapes[name]) == stacked + 2 and shapes[name][-1] > 1
        for name in ("scale", "zero", "offset")
        if name in shapes
    )
    group = group if grouped else None
    parts = prod(sizes[a] for a in words)
    _check_parts(k or shapes["x"][-1], parts, op, bits, group)

    summed, kept = (words, n) if k is None else (n, words)
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
    return Plan(operands, (*lead, kept), summed, group, k and k // parts, over, entries, part)


def _check_parts(k: int, parts: int, op: str, bits: int, group: int | None) -> None:
    unit = lcm(32 // gcd(bits, 32), group or 1)
    if parts == 1 or k % (parts * unit) == 0:
        return
    name = "w.packed" if op == "gemv" else "Wq"
    possible = [p for p in range(1, k // unit + 1) if k % (p * unit) == 0] or [1]
    devices = f"{' or '.join(map(str, possible))} device{'s' * (possible != [1])}"
    raise ValueError(
        f"{op}: {name} must be sharded along K in whole words and groups, multiples of {unit} codes: for K = {k} over "
        f"{devices}; got {parts}"
    )


def dims_of(spec: PartitionSpec, ndim: int) -> Dims:
    """A PartitionSpec with one entry a dimension, each a tuple."""
    dims = (() if d is None else d if isinstance(d, tuple) else (d,) for d in spec)
    return (*dims, *((),) * (ndim - len(spec)))


def spec_of(dims: Dims) -> PartitionSpec:
    """The other way."""
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


def propagation_rule(shapes: Mapping[str, tuple[int, ...]], transposed: bool) -> SdyShardingRule:
    """Which dimensions are cut alike, for the propagation of shardings."""
    summed, kept = ("n", "k") if transposed else ("k", "n")
    stacked = ("s",) if "index" in shapes else ()
    lead = tuple(f"l{i}" for i in range(len(shapes["x"]) - 1))
    dims = {
        "x": (*lead, summed),
        "index": lead,
        "packed": (*stacked, "n", "k"),
        "codebook": (*stacked, "codes"),
    }
    factors = {
        # A dimension of size 1 is cut like no other.
        name: tuple(
            factor if size > 1 else f"{name}{i}"
            for i, (factor, size) in enumerate(zip(dims.get(name, (*stacked, "n", f"{name}groups")), shape))
        )
        for name, shape in shapes.items()
    }
    sums = {summed, "s"} & {factor for of in factors.values() for factor in of}
    return SdyShardingRule(
        tuple(ArrayMapping(*of) for of in factors.values()),
        (ArrayMapping(*lead, kept),),
        reduction_factors=tuple(sorted(sums)),
    )
