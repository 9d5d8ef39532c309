"""Trains the byte-level model that llama.py runs, on the source files of Python's standard library.

    python examples/train.py --out examples/stdlib-4m.safetensors

Five minutes on one large GPU. The text's licence is in corpus.py and goes into the file's metadata.
"""

import argparse
import dataclasses
import functools
import platform

import corpus
import embedded
import jax
import jax.numpy as jnp
import model
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

STEPS_PER_CALL = 50  # steps in one jitted call, so that the GPU never waits for Python
STRIDE = 256  # of each held-out window, the bytes that are scored


def init(key, config):
    """Normal weights of standard deviation 0.02, less for what adds to the residual; norms 1."""
    paths, structure = jax.tree.flatten_with_path(embedded.shapes(config))
    leaves = []
    for i, (path, leaf) in enumerate(paths):
        std = 0.02 / (2 * config.n_layers) ** 0.5 if path[-1].key in ("out", "down") else 0.02
        normal = std * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
        leaves.append(normal if leaf.ndim > 1 else jnp.ones(leaf.shape))
    return jax.tree.unflatten(structure, leaves)


@model.around
def linear(x, w):
    return x @ w.T


def half(params):
    """The weights as they compute and as they are saved; the optimiser keeps float32."""
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


def loss(params, text, config):
    """Mean negative log likelihood of text (batch, context + 1), in nats per byte."""
    one = functools.partial(model.forward, half(params), config=config, linear=linear)
    logits, _ = jax.vmap(one)(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def adamw(steps, learning_rate):
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(200, steps // 10), steps)
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )


@functools.partial(jax.jit, static_argnames=("config", "optimizer", "batch"), donate_argnums=0)
def train_steps(state, text, config, optimizer, batch):
    """STEPS_PER_CALL steps on random pieces of text (bytes,); state is (params, optimiser, key)."""

    def step(state, _):
        params, moments, key = state
        key, now = jax.random.split(key)
        starts = jax.random.randint(now, (batch, 1), 0, len(text) - config.context)
        pieces = text[starts + jnp.arange(config.context + 1)].astype(jnp.int32)
        value, grads = jax.value_and_grad(loss)(params, pieces, config)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, key), value

    state, losses = jax.lax.scan(step, state, length=STEPS_PER_CALL)
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames="config")
def held_out(params, windows, config):
    return model.mean_bits(half(params), windows, config, linear, STRIDE)


def main():
    config = model.Config()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="examples/stdlib-4m.safetensors")
    parser.add_argument("--steps", type=int, default=8000, help=f"a multiple of {STEPS_PER_CALL}")
    parser.add_argument("--batch", type=int, default=128, help=f"pieces of {config.context} bytes")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", help="the library to read, if not that of this Python")
    for field in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff"):
        option = "--" + field.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(config, field))
    args = vars(parser.parse_args())
    if args["steps"] < 1 or args["steps"] % STEPS_PER_CALL:
        parser.error(f"--steps must be a multiple of {STEPS_PER_CALL}")
    names = {field.name for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{k: v for k, v in args.items() if k in names})

    text = jnp.asarray(corpus.train_text(args["stdlib"]))
    windows = jnp.asarray(corpus.held_out_windows(config.context, STRIDE, root=args["stdlib"]))
    optimizer = adamw(args["steps"], args["learning_rate"])
    init_key, key = jax.random.split(jax.random.key(args["seed"]))
    params = init(init_key, config)
    count = sum(p.size for p in jax.tree.leaves(params))
    print(f"{len(text) / 1e6:.1f} MB of text, {count / 1e6:.2f} M parameters, {jax.devices()[0]}")

    state = params, optimizer.init(params), key
    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with bar:
        task = bar.add_task("compiling", total=args["steps"])
        bpb = float("nan")
        for done in range(0, args["steps"], STEPS_PER_CALL):
            state, value = train_steps(state, text, config, optimizer, args["batch"])
            if done % 500 == 0 or done + STEPS_PER_CALL >= args["steps"]:
                bpb = float(held_out(state[0], windows, config))
            train_bpb = float(value) / float(jnp.log(2.0))
            description = f"bits per byte: train {train_bpb:.3f}, held-out {bpb:.3f}"
            bar.update(task, completed=done + STEPS_PER_CALL, description=description)

    metadata = {
        "steps": str(args["steps"]),
        "held_out_bits_per_byte": f"{bpb:.4f}",
        "python": platform.python_version(),
        "license": corpus.LICENSE,
    }
    embedded.save(args["out"], half(state[0]), config, metadata)
    print(f"{args['out']}: held-out {bpb:.3f} bits per byte")


if __name__ == "__main__":
    main()
