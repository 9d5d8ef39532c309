"""Llama-architecture decoding in which every matrix product is a jaxgemv call: text, speed, and what int4 costs.

    python examples/llama.py --prompt "def quicksort(items):" --weights int4

1. A byte-level model of 4 M parameters, trained by train.py on Python's standard library, writes code.
2. The same model with bf16, float32, int8 and int4 weights: speed, size, and how well it predicts
   modules that it has never seen.
3. So small a model says little about speed: the same decoder at a real size, with random weights.
"""

import argparse
import codecs
import dataclasses
import functools
import itertools
import time

import corpus
import decode
import embedded
import jax
import jax.numpy as jnp
import model
import numpy as np
import stacks
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PROMPT = '''class Queue:
    """A first-in, first-out queue."""

    def __init__(self'''
STRIDE = 256  # of each held-out window, the bytes that are scored

console = Console()


def load(scan):
    params, config = embedded.load()
    return params, dataclasses.replace(config, scan=scan)


def in_form(params, config):
    """Layers as a loop over them takes them, or else the fastest."""
    form = stacks.stack if config.scan else stacks.in_few_arrays
    return params | {"layers": form(params["layers"])}


def generate(params, config, prompt, count, seed, temperature):
    """The `count` bytes that follow prompt (bytes), one at a time."""
    decoder = decode.Decoder(params, config, temperature=temperature, seed=seed, size=config.context)
    return decoder.generate(list(prompt), count)


def tokens_per_second(params, config, description, progress, seconds):
    """Decodes from an empty cache for about `seconds` (after compiling) and times it."""
    task = progress.add_task(f"{description}: compiling", total=None)
    state = jnp.zeros(1, jnp.int32), jnp.int32(0), model.empty_cache(params, config)
    loop, arrays = decode.jitted(decode.several(decode.step, 1), params), jax.tree.leaves(params)
    one, key, temperature = jnp.int32(1), jax.random.key(0), jnp.float32(1)

    def step(token, position, cache):
        return loop(arrays, token, one, position, cache, key, temperature, None, config)[:3]

    for _ in range(3):  # compiles; warms up; and tells how long a step takes
        start = time.perf_counter()
        state = jax.block_until_ready(step(*state))
        once = time.perf_counter() - start
    count = int(np.clip(seconds / once, 4, config.context - 3))
    progress.update(task, description=f"{description}: decoding", total=count)
    start = time.perf_counter()
    for _ in range(count):
        state = step(*state)
        progress.advance(task)
    jax.block_until_ready(state)
    return count / (time.perf_counter() - start)


def megabytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6


def quality_table(params, config, progress):
    """Speed, size and held-out bits per byte of the trained model, for each kind of weights."""
    windows = jnp.asarray(corpus.held_out_windows(config.context, STRIDE))
    held_out = f"held out: {len(windows) * STRIDE} bytes of {len(corpus.HELD_OUT)} modules"
    table = Table("weights", "MB", "tokens/s", "held-out bits/byte", title="4 M, trained", caption=held_out)
    score = jax.jit(functools.partial(model.mean_bits, config=config, linear=decode.linear, stride=STRIDE))
    for kind in embedded.KINDS:
        now = in_form(embedded.convert(params, kind), config)
        speed = tokens_per_second(now, config, kind, progress, seconds=2)
        parts = progress.track(jnp.split(windows, 8), description=f"{kind}: reading held-out modules")
        bits = np.mean([score(now, part) for part in parts])
        table.add_row(kind, f"{megabytes(now):.2f}", f"{speed:.0f}", f"{bits:.3f}")
    return table


def size_table(name, scan, progress):
    """Speed at a real size, each kind of weights built after the one before is freed."""
    config = dataclasses.replace(embedded.SIZES[name], scan=scan)
    table = Table("weights", "MB", "tokens/s", "speed-up", title=f"{name}, random weights")
    base = None
    for kind in embedded.KINDS:
        track = functools.partial(progress.track, description=f"{kind}: making the weights")
        params = in_form(embedded.random_model(config, kind, track), config)
        speed = tokens_per_second(params, config, kind, progress, seconds=6)
        base = base or speed
        table.add_row(kind, f"{megabytes(params):.0f}", f"{speed:.1f}", f"{speed / base:.2f}x")
        del params  # before the next is made
    return table


def write(prompt, weights="int4", tokens=200, seed=0, temperature=0.5, scan=False):
    """Prints the prompt (bytes) and what the trained model makes of it, byte by byte."""
    params, config = load(scan)
    console.rule(f"{weights} weights, on {jax.devices()[0].device_kind}")
    params = in_form(embedded.convert(params, weights), config)
    text = generate(params, config, prompt, tokens, seed, temperature)
    with progress_bars() as progress:
        progress.add_task(f"{weights}: compiling", total=None)
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
    parser.add_argument("--weights", choices=embedded.KINDS, default="int4", help="what writes the text")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to write")
    parser.add_argument(
        "--size",
        choices=[*embedded.SIZES, "none"],
        default="0.5b",
        help="shape of the last part; 8b: 16 GB in bf16",
    )
    parser.add_argument(
        "--scan", action="store_true", help="a loop over stacked layers, which compiles faster"
    )
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    params, config = load(args.scan)
    prompt = args.prompt.encode()
    if args.tokens < 1 or not args.temperature >= 0:
        parser.error("--tokens must be at least 1, and --temperature at least 0")
    if not prompt:
        parser.error("--prompt must have at least one byte")
    if len(prompt) + args.tokens > config.context:
        parser.error(f"--prompt and --tokens must fit in {config.context} bytes together")

    write(prompt, args.weights, args.tokens, args.seed, args.temperature or None, args.scan)

    with progress_bars() as progress:
        table = quality_table(params, config, progress)
    console.print(table)
    if args.size != "none":
        with progress_bars() as progress:
            table = size_table(args.size, args.scan, progress)
        console.print(table)


if __name__ == "__main__":
    main()
