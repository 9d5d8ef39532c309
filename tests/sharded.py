"""Meshes of the 8 virtual CPU devices, sharded weights, and what a compiled program does with them."""

import re
from collections import Counter
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import Case, make

from jaxgemv import QuantizedTensor
from jaxgemv._ffi import TARGET

# In these versions a shard_map over some of several Explicit axes gathers its operands, whatever is in it, and so does
# a vmap, which becomes one.
PARTIAL_GATHERS = (0, 10, 1) <= jax.__version_info__ < (0, 11, 2)

CASE = Case(4, 16, 512, 64, "zero", bias=True)

# Shardings of x, of the weight's N and K, of the result, and the collectives that they need.
LAYOUTS = {
    "columns": ((None, None), ("model", None), (None, "model"), {}),
    "rows": ((None, "model"), (None, "model"), (None, None), {"all-reduce": 1}),
    "rows of a replicated x": ((None, None), (None, "model"), (None, None), {"all-reduce": 1}),
    "rows over two axes": ((None, None), (None, ("data", "model")), (None, None), {"all-reduce": 1}),
    "both": ((None, "model"), ("data", "model"), (None, "data"), {"all-reduce": 1}),
    "data": (("data", None), (None, None), ("data", None), {}),
    "data and columns": (("data", None), ("model", None), ("data", "model"), {}),
    "data and rows": (("data", "model"), (None, "model"), ("data", None), {"all-reduce": 1}),
    # x has to be gathered, the weight has not.
    "x against columns": ((None, "model"), ("model", None), (None, "model"), {"all-gather": 1}),
}

# The reference is cut by XLA, and by us only under Explicit axes; one layout of each kind.
every_layout = pytest.mark.parametrize(
    ("implementation", "layout"),
    [*(("cpu", layout) for layout in LAYOUTS), ("xla", "rows"), ("xla", "data and columns"), ("xla", "both")],
    indirect=["implementation"],
)

# The collectives of the gradient with respect to x: N and K change places.
GRADIENTS = {layout: {"all-reduce": 1} if w[0] else {} for layout, (_, w, _, _) in LAYOUTS.items()}

STACKS = [(None, "model", None), (None, None, "model"), ("data", "model", None), ("model", None, "data")]

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(kind: AxisType, shape=(2, 4), names=("data", "model"), platform="cpu") -> jax.sharding.Mesh:
    devices = jax.devices(platform)[: prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def put(a, mesh, *spec):
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


def put_weight(w: QuantizedTensor, mesh, *spec) -> QuantizedTensor:
    """Codes by `spec`, ([stack,] N, K), and every parameter by as much of it as it has dimensions."""
    shardings = weight_shardings(w, mesh, *spec)
    return jax.tree.map(jax.device_put, w, shardings)


def weight_shardings(w: QuantizedTensor, mesh, *spec):
    def of(path, a):
        cut = spec[: a.ndim]
        if path[0].name in ("codebook", "perm"):
            cut = (*spec[:-2], None)[: a.ndim]
        elif a.ndim == len(spec) and a.shape[-1] == 1:
            cut = (*cut[:-1], None)
        return NamedSharding(mesh, P(*cut))

    return jax.tree_util.tree_map_with_path(of, w)


def laid_out(layout: str, bits: int, mesh, rng):
    """CASE, and its x, weight and bias on the mesh."""
    x_spec, w_spec, _, _ = LAYOUTS[layout]
    p = make(rng, bits, "float32", CASE, exact=True)
    return p, (put(p.x, mesh, *x_spec), put_weight(p.tensor, mesh, *w_spec), put(p.bias, mesh, w_spec[0]))


def assert_cut_in_place(compiled, expected: dict[str, int], implementation: str) -> None:
    """The expected collectives and, with a kernel, one call of it on weights that stay where they are."""
    assert collectives(compiled) == expected
    if implementation == "cpu":
        assert kernel_calls(compiled) == 1
        assert moved_codes(compiled) == []


def spec_of(y) -> tuple:
    """The sharding of an array, one entry a dimension."""
    return (*y.sharding.spec, *(None,) * (y.ndim - len(y.sharding.spec)))


def stack(problems) -> QuantizedTensor:
    return jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))


def collectives(compiled) -> dict[str, int]:
    """How many of each kind; on a GPU they may start and finish in two instructions."""
    return dict(Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())))


def kernel_calls(compiled) -> int:
    """Of products and of transposed ones."""
    return compiled.as_text().count(f'custom_call_target="{TARGET}"')


def moved_codes(compiled) -> list[str]:
    """Instructions that make packed codes, uint32 of rank 2 or 3; none where weights stay where they are."""
    instructions = re.findall(r"^ .*? = (.*?) ([a-z][\w-]*)\(", compiled.as_text(), re.MULTILINE)
    in_place = {"parameter", "bitcast", "get-tuple-element", "tuple", "while"}
    return [
        f"{op}: {type}" for type, op in instructions if re.search(r"u32\[\d+,", type) and op not in in_place
    ]
