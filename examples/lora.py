"""Low-rank adaptation (LoRA) of a language model whose weights stay frozen in int4.

    python examples/lora.py --module argparse

The model in this folder has never seen this module of the standard library. Each of its matrices gets
two thin float matrices beside it, which are all that is trained, on the first half of the module.
The second half tells whether it helped. See Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685.
"""

import argparse
import functools
from typing import NamedTuple

import corpus
import embedded
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
from rich.progress import track

from jaxgemv import QuantizedTensor, gemv


class Adapted(NamedTuple):
    """w + up down: w (N, K) frozen, down (rank, K) and up (N, rank) trained."""

    w: QuantizedTensor
    down: jax.Array
    up: jax.Array


@model.around
def linear(x, w):
    if not isinstance(w, Adapted):
        return gemv(x, w)
    return gemv(x, w.w) + gemv(gemv(x, w.down), w.up).astype(x.dtype)


def is_matrix(leaf):
    return isinstance(leaf, QuantizedTensor)


def init(key, layers, rank):
    """Adapters for every matrix of the layers. They add nothing yet: `up` is zero."""
    leaves, structure = jax.tree.flatten(layers, is_leaf=is_matrix)
    adapters = []
    for i, leaf in enumerate(leaves):
        if is_matrix(leaf):
            n, k = leaf.shape
            down = jax.random.normal(jax.random.fold_in(key, i), (rank, k)) * k**-0.5
            adapters.append((down, jnp.zeros((n, rank))))
        else:
            adapters.append(None)
    return jax.tree.unflatten(structure, adapters)


def adapt(params, adapters):
    def both(leaf, adapter):
        return Adapted(leaf, *adapter) if is_matrix(leaf) else leaf

    return params | {"layers": jax.tree.map(both, params["layers"], adapters, is_leaf=is_matrix)}


@functools.partial(jax.jit, static_argnames="config")
def bits(adapters, params, windows, config):
    """Per byte, over all of the windows (windows, context + 1)."""
    return model.mean_bits(adapt(params, adapters), windows, config, linear, config.context)


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames=("adapters", "moments"))
def step(adapters, moments, params, windows, config, optimizer):
    gradients = jax.grad(bits)(adapters, params, windows, config)
    updates, moments = optimizer.update(gradients, moments, adapters)
    return optax.apply_updates(adapters, updates), moments


def windows_of(module, context):
    """The two halves of a module's text, each (windows, context + 1)."""
    text = corpus.held_out_texts()[module]
    count = len(text) // (context + 1)
    windows = jnp.asarray(text[: count * (context + 1)].reshape(count, context + 1))
    return windows[: count // 2], windows[count // 2 :]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--module", choices=corpus.HELD_OUT, default="argparse")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    args = parser.parse_args()
    if min(args.steps, args.rank, args.batch) < 1:
        parser.error("--steps, --rank and --batch must be at least 1")

    params, config = embedded.load()
    params = embedded.convert(params, "int4")
    first, second = windows_of(args.module, config.context)
    adapters = init(jax.random.key(0), params["layers"], args.rank)
    optimizer = optax.adam(args.learning_rate)
    moments = optimizer.init(adapters)
    before = [float(bits(adapters, params, half[:16], config)) for half in (first, second)]

    for i in track(range(args.steps), description="training", transient=True):
        at = np.arange(args.batch) + i * args.batch
        adapters, moments = step(adapters, moments, params, first[at % len(first)], config, optimizer)
    after = [float(bits(adapters, params, half[:16], config)) for half in (first, second)]

    trained, frozen = (sum(a.nbytes for a in jax.tree.leaves(tree)) / 1e6 for tree in (adapters, params))
    print(
        f"{args.module}: {trained:.2f} MB trained beside {frozen:.2f} MB of int4 weights, {args.steps} steps"
    )
    for half, b, a in zip(("trained on", "not seen"), before, after, strict=True):
        print(f"bits per byte of the half {half}: {b:.3f} -> {a:.3f}")


if __name__ == "__main__":
    main()
