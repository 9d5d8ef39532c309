"""Meshes of the 8 virtual CPU devices, sharded weights, and what a compiled program does with them."""

import re
from collections import Counter

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgemv import QuantizedTensor
from jaxgemv._ffi import TARGET

# In these versions a shard_map over some of several Explicit axes gathers its operands, whatever is in it, and so does
# a vmap, which becomes one.
PARTIAL_GATHERS = (0, 10, 1) <= jax.__version_info__ < (0, 11, 2)

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(kind: AxisType, shape=(2, 4), names=("data", "model")) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices("cpu")[:8])


def put(a, mesh, *spec):
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


def put_weight(w: QuantizedTensor, mesh, *spec) -> QuantizedTensor:
    """Codes by `spec`, ([stack,] N, K), and every parameter by as much of it as it has dimensions."""
    shardings = weight_shardings(w, mesh, *spec)
    return jax.tree.map(jax.device_put, w, shardings)


def weight_shardings(w: QuantizedTensor, mesh, *spec):
    def of(path, a):
        cut = spec[: a.ndim]
        if path[0].name == "codebook" or (a.ndim == len(spec) and a.shape[-1] == 1):
            cut = (*cut[:-1], None)
        return NamedSharding(mesh, P(*cut))

    return jax.tree_util.tree_map_with_path(of, w)


def stack(problems) -> QuantizedTensor:
    return jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))


def collectives(compiled) -> dict[str, int]:
    """How many of each kind; on a GPU they may start and finish in two instructions."""
    return dict(Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())))


def kernel_calls(compiled) -> int:
    return compiled.as_text().count(f'custom_call_target="{TARGET}"')


def moved_codes(compiled) -> list[str]:
    """Instructions that make packed codes, uint32 of rank 2 or 3; none where weights stay where they are."""
    instructions = re.findall(r"^ .*? = (.*?) ([a-z][\w-]*)\(", compiled.as_text(), re.MULTILINE)
    in_place = {"parameter", "bitcast", "get-tuple-element", "tuple", "while"}
    return [
        f"{op}: {type}" for type, op in instructions if re.search(r"u32\[\d+,", type) and op not in in_place
    ]
