"""A mixture of experts, two of eight for each token, whose int4 experts are read in place.

    python examples/moe.py

`gemv(x, experts, index=ids)` takes the stack of all experts and, for each row of x, the number of
the one that it goes to. No expert is gathered into a copy, none that nobody chose is read, and rows
of one expert share a read of it. The result is checked against every expert's dense product with
every token, weighted by the router.
"""

import argparse

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxgemv import dequantize, gemv, quantize

TOP = 2


def init(key, experts, d_model, d_ff):
    """A float router (experts, d_model), and int4 stacks (experts, outputs, inputs)."""
    keys = jax.random.split(key, 3)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5

    return {
        "router": normal(keys[0], experts, d_model),
        "gate_up": quantize(normal(keys[1], experts, 2 * d_ff, d_model)),
        "down": quantize(normal(keys[2], experts, d_model, d_ff)),
    }


def route(x, router):
    """Of tokens (T, d_model): the experts of each (T, TOP), and their weights, which add up to 1."""
    scores, ids = jax.lax.top_k(gemv(x, router, out_dtype=jnp.float32), TOP)
    return ids, jax.nn.softmax(scores)


def swiglu(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@jax.jit
def mixture(x, layer):
    """x (T, d_model) -> (T, d_model), by the experts that each token chose."""
    ids, weights = route(x, layer["router"])
    rows, ids = jnp.repeat(x, TOP, axis=0), ids.reshape(-1)  # a row for each token and expert
    hidden = swiglu(gemv(rows, layer["gate_up"], index=ids, out_dtype=jnp.float32))
    y = gemv(hidden, layer["down"], index=ids)
    return jnp.einsum("tek,te->tk", y.reshape(*weights.shape, -1), weights)


@jax.jit
def dense(x, layer):
    """The same by all experts, in float32, with weights of zero for those not chosen."""
    ids, weights = route(x, layer["router"])
    experts = layer["router"].shape[0]
    weights = jnp.einsum("tek,te->tk", jax.nn.one_hot(ids, experts), weights)
    gate_up, down = (dequantize(layer[name], jnp.float32) for name in ("gate_up", "down"))
    product = jnp.einsum("...k,enk->...en", x.astype(jnp.float32), gate_up, precision="highest")
    y = jnp.einsum("tek,enk->ten", swiglu(product), down, precision="highest")
    return jnp.einsum("ten,te->tn", y, weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for option, default in (("tokens", 16), ("experts", 8), ("d-model", 512), ("d-ff", 1024)):
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args()

    key, now = jax.random.split(jax.random.key(0))
    layer = init(key, args.experts, args.d_model, args.d_ff)
    x = jax.random.normal(now, (args.tokens, args.d_model), jnp.bfloat16)
    y, expected = mixture(x, layer), dense(x, layer)
    error = float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected))

    ids, _ = route(x, layer["router"])
    table = Table("expert", "tokens", title=f"top {TOP} of {args.experts}, on {jax.devices()[0].device_kind}")
    for expert, count in enumerate(jnp.bincount(ids.reshape(-1), length=args.experts)):
        table.add_row(str(expert), str(count))
    Console().print(table)
    print(f"relative difference from the dense computation: {error:.1e}")
    if not error < 1e-2:
        raise SystemExit("the mixture differs from the dense computation")


if __name__ == "__main__":
    main()
