"""Llama-architecture decoding in which every matrix product is a jaxgemv call.

    python examples/llama.py --prompt "def quicksort(items):" --weights int4

1. A byte-level model of 4 M parameters, trained by train.py on Python's standard library, writes code.
2. The same model with bf16, float32, int8 and int4 weights: speed, size, and how well it predicts
   modules that it has never seen.
3. So small a model says little about speed: the same decoder at a real size, with random weights.
"""

import argparse
import codecs
import functools
import itertools
import pathlib
import time

import corpus
import jax
import jax.numpy as jnp
import model
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxgemv import gemv, quantize

PROMPT = '''class Queue:
    """A first-in, first-out queue."""

    def __init__(self'''
CHECKPOINT = pathlib.Path(__file__).with_name("stdlib-4m.safetensors")
KINDS = {"bf16": None, "f32": None, "int8": 8, "int4": 4}  # bits; groups of 128 weights share a scale
STRIDE = 256  # of each held-out window, the bytes that are scored

LLAMA = functools.partial(model.Config, vocab=128_256, rope_theta=500_000.0)
SIZES = {
    "0.5b": LLAMA(d_model=1024, n_layers=24, n_heads=16, n_kv_heads=4, head_dim=64, d_ff=4096),
    "1b": LLAMA(d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192),
    "8b": LLAMA(d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14_336, tied=False),
}

console = Console()


def convert(params, kind):
    """The matrices (N, K) as they are, in bf16, or as QuantizedTensors; or all in float32."""
    if kind == "bf16":
        return params
    if kind == "f32":
        return jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    low_bit = functools.partial(quantize, bits=KINDS[kind], group_size=128)
    return jax.tree.map(lambda weight: low_bit(weight) if weight.ndim == 2 else weight, params)


def in_form(params, scan):
    """Layers as they are, or stacked for a loop over them."""
    return params | {"layers": model.stack(params["layers"])} if scan else params


@functools.partial(jax.jit, static_argnames=("shape", "kind"))
def random_weight(key, shape, kind):
    """Uniform weights with the variance 1 / K, from the four bytes of random words: quick to make."""
    if len(shape) == 1:
        return convert(jnp.ones(shape, jnp.bfloat16), kind)
    words = jax.random.bits(key, (shape[0], shape[1] // 4))
    noise = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(shape).astype(jnp.float32) - 127.5
    return convert((noise / (73.9 * shape[1] ** 0.5)).astype(jnp.bfloat16), kind)


def random_model(config, kind, progress):
    """One matrix at a time, so that the bf16 model never exists beside the quantised one."""
    leaves, structure = jax.tree.flatten(model.shapes(config))
    key = jax.random.key(0)
    track = progress.track(leaves, description=f"{kind}: making the weights")
    leaves = [random_weight(jax.random.fold_in(key, i), s.shape, kind) for i, s in enumerate(track)]
    return jax.block_until_ready(jax.tree.unflatten(structure, leaves))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def step(params, tokens, position, cache, key, temperature, config):
    """Reads tokens (T,) that start at `position`; the next token (1,), its position, and the cache.

    With the whole prompt it is the prefill, with the last token it is the decode step.
    """
    logits, cache = model.forward(params, tokens, config, gemv, cache, position)
    position = position + len(tokens)
    token = jax.random.categorical(jax.random.fold_in(key, position), logits[-1] / temperature)
    return token[None], position, cache


def generate(params, config, prompt, count, seed, temperature):
    """The `count` bytes that follow prompt (bytes), one at a time."""
    token, position, cache = jnp.asarray(list(prompt)), jnp.int32(0), model.empty_cache(params, config)
    key = jax.random.key(seed)
    for _ in range(count):
        token, position, cache = step(params, token, position, cache, key, temperature, config)
        yield int(token[0])


def tokens_per_second(params, config, description, progress, seconds):
    """Decodes from an empty cache for about `seconds` (after compiling) and times it."""
    task = progress.add_task(f"{description}: compiling", total=None)
    state = jnp.zeros(1, jnp.int32), jnp.int32(0), model.empty_cache(params, config)
    key = jax.random.key(0)
    for _ in range(3):  # compiles; warms up; and tells how long a step takes
        start = time.perf_counter()
        state = jax.block_until_ready(step(params, *state, key, 1.0, config))
        once = time.perf_counter() - start
    count = int(np.clip(seconds / once, 4, config.context - 3))
    progress.update(task, description=f"{description}: decoding", total=count)
    start = time.perf_counter()
    for _ in range(count):
        state = step(params, *state, key, 1.0, config)
        progress.advance(task)
    jax.block_until_ready(state)
    return count / (time.perf_counter() - start)


def megabytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6


def quality_table(params, config, scan, progress):
    """Speed, size and held-out bits per byte of the trained model, for each kind of weights."""
    windows = jnp.asarray(corpus.held_out_windows(config.context, STRIDE))
    held_out = f"held out: {len(windows) * STRIDE} bytes of {len(corpus.HELD_OUT)} modules"
    table = Table("weights", "MB", "tokens/s", "held-out bits/byte", title="4 M, trained", caption=held_out)
    score = jax.jit(functools.partial(model.bits_per_byte, config=config, linear=gemv, stride=STRIDE))
    for kind in KINDS:
        now = in_form(convert(params, kind), scan)
        speed = tokens_per_second(now, config, kind, progress, seconds=2)
        parts = progress.track(jnp.split(windows, 8), description=f"{kind}: reading held-out modules")
        bits = np.mean([score(now, part) for part in parts])
        table.add_row(kind, f"{megabytes(now):.2f}", f"{speed:.0f}", f"{bits:.3f}")
    return table


def size_table(name, scan, progress):
    """Speed at a real size, each kind of weights built after the one before is freed."""
    config = SIZES[name]
    table = Table("weights", "MB", "tokens/s", "speed-up", title=f"{name}, random weights")
    base = None
    for kind in KINDS:
        params = in_form(random_model(config, kind, progress), scan)
        speed = tokens_per_second(params, config, kind, progress, seconds=6)
        base = base or speed
        table.add_row(kind, f"{megabytes(params):.0f}", f"{speed:.1f}", f"{speed / base:.2f}x")
        del params  # before the next is made
    return table


def write(params, config, prompt, args):
    """Prints the prompt and what the model makes of it, byte by byte."""
    console.rule(f"{args.weights} weights, on {jax.devices()[0].device_kind}")
    params = in_form(convert(params, args.weights), args.scan)
    text = generate(params, config, prompt, args.tokens, args.seed, args.temperature)
    with progress_bars() as progress:
        progress.add_task(f"{args.weights}: compiling", total=None)
        first = list(itertools.islice(text, 2))  # compiles the prefill, then the decode step
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in itertools.chain(prompt, first, text):
        print(decoder.decode(bytes([byte])), end="", flush=True)
    print()
    console.rule()


def progress_bars():
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, refresh_per_second=4, transient=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--weights", choices=KINDS, default="int4", help="what writes the text")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to write")
    parser.add_argument(
        "--size", choices=[*SIZES, "none"], default="0.5b", help="shape of the last part; 8b: 16 GB in bf16"
    )
    parser.add_argument(
        "--scan", action="store_true", help="a loop over stacked layers, which compiles faster"
    )
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    params, config = model.load(CHECKPOINT)
    prompt = args.prompt.encode()
    if not prompt:
        parser.error("--prompt must have at least one byte")
    if len(prompt) + args.tokens > config.context:
        parser.error(f"--prompt and --tokens must fit in {config.context} bytes together")

    write(params, config, prompt, args)

    with progress_bars() as progress:
        table = quality_table(params, config, args.scan, progress)
    console.print(table)
    if args.size != "none":
        with progress_bars() as progress:
            table = size_table(args.size, args.scan, progress)
        console.print(table)


if __name__ == "__main__":
    main()
