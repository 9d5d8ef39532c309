"""One of two processes that share a mesh of eight devices, four each; test_processes.py starts both.

python process.py RANK PORT WHAT      # Auto, Explicit or shard_map
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import collectives, kernel_calls, moved_codes, weight_shardings

from jaxgemv import gemv


def main(rank: int, port: str, what: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    assert (len(jax.devices()), len(jax.local_devices()), jax.process_count()) == (8, 4, 2)
    kind = AxisType.Explicit if what == "Explicit" else AxisType.Auto
    # "far" is the axis between the processes.
    mesh = jax.make_mesh((2, 4), ("far", "near"), axis_types=(kind, kind))
    for n, k in (("far", None), (None, "far"), ("near", "far"), (None, ("far", "near")), (None, "near")):
        products(mesh, n, k, what)
        print(f"{what}: N over {n}, K over {k}: right", flush=True)


def place(a: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])


def products(mesh, n, k, what: str) -> None:
    """A product and its gradient, each process looking at what it has of them."""
    p = make(np.random.default_rng(0), 4, "float32", Case(4, 16, 512, 64, "zero", bias=True), exact=True)
    x, bias = place(p.x, NamedSharding(mesh, P(None, k))), place(p.bias, NamedSharding(mesh, P(n)))
    shardings = weight_shardings(p.tensor, mesh, n, k)
    w = jax.tree.map(place, p.tensor, shardings)

    def f(x, w, bias):
        return gemv(x, w, bias=bias, implementation="cpu")

    if what == "shard_map":
        specs = jax.tree.map(lambda s: s.spec, shardings)

        @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, k), specs, P(n)), out_specs=P(None, n))
        def f(x, w, bias):
            y = gemv(x, w, implementation="cpu")
            return (y if k is None else jax.lax.psum(y, k)) + bias

    compiled = jax.jit(f).lower(x, w, bias).compile()
    assert kernel_calls(compiled) == 1
    assert collectives(compiled) == ({} if k is None else {"all-reduce": 1}), collectives(compiled)
    assert moved_codes(compiled) == []
    same(compiled(x, w, bias), p.answer())
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(lambda x, w, bias: jnp.sum(f(x, w, bias))))
        compiled = grad.lower(x, w, bias).compile()
        grad = grad(x, w, bias)
    assert kernel_calls(compiled) == 1
    assert collectives(compiled) == ({} if n is None else {"all-reduce": 1}), collectives(compiled)
    same(grad, np.broadcast_to(p.weight().sum(0), p.x.shape))


def same(a: jax.Array, expected: np.ndarray) -> None:
    for shard in a.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
