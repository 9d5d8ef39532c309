"""A step of examples/decode.py: for which models, sequences, tokens a call and devices, and how long it takes."""

import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import decode_trace

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import decode
import embedded
import model
import stacks

AXIS = "model"
# How matrices are cut over devices: by their outputs, or by their inputs, and then what they give is summed.
OUTPUTS, INPUTS = ("qkv", "gate_up", "head"), ("out", "down")
_WARM_UP = 4  # calls: the first records, or compiles, what later ones replay
_LONG = 20  # seconds, after which two rounds are enough


ACTIVATIONS = {"exact": None, "f32": jnp.float32, "bf16": jnp.bfloat16, "int8": None}  # dtypes, of a file


class Model(NamedTuple):
    name: str
    weights: str
    activations: str
    params: Any
    config: Any


class Plan(NamedTuple):
    tokens: int  # that each sequence gets in a round
    rounds: int
    steps: int  # tokens that each sequence gets from one call
    traced: int  # calls of which a profile is taken

    def size(self, context: int) -> int:
        """Tokens that the cache has room for: but on a GPU attention reads all of it."""
        return -(-(context + self.tokens) // 128) * 128


class Timed(NamedTuple):
    us: float  # for one token of every sequence: median of the rounds
    rounds_us: list[float]
    enqueue_us: float  # until the host had asked for it
    compile_s: float
    split: decode_trace.Split
    note: str | None  # why there is no split


def random(size: str, kind: str, activations: str = "exact") -> Model:
    config = dataclasses.replace(embedded.SIZES[size], activations=activations)
    return Model(size, kind, activations, embedded.random_model(config, kind, iter), config)


def in_few_arrays(of: Model) -> Model:
    """As a step takes it."""
    return of._replace(params=of.params | {"layers": stacks.in_few_arrays(of.params["layers"])})


def of_file(path: Path, context: int, activations: str = "exact") -> Model:
    import checkpoints  # which takes more packages than the others

    # By default as examples/chat.py has it.
    dtype = ACTIVATIONS[activations] or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    params, config, _ = checkpoints.open_model(path, dtype, context=context)
    if activations in decode.LINEAR:
        config = dataclasses.replace(config, activations=activations)
    return Model(path.stem, "native", activations, params, config)


def bytes_read(of: Model, batch: int, positions: float) -> int:
    """Of the weights, once for all sequences, and of so many positions of each cache."""
    skipped = [] if of.config.tied else jax.tree.leaves(of.params["embedding"])  # of which a row is read
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(of.params)) - sum(leaf.nbytes for leaf in skipped)
    config, itemsize = of.config, of.params["norm"].dtype.itemsize
    keys_and_values = 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize
    return weights + int(batch * positions * keys_and_values)


def cut(of: Model, devices: list) -> tuple[Model, Mesh]:
    """The model over several devices. Rows of a matrix count as in the order of the devices that have them.

    So a device has its own heads in one qkv, and its own part of both halves of gate_up.
    """
    mesh = Mesh(np.array(devices), (AXIS,))
    params = of.params
    if of.config.tied:  # each device looks rows up, and multiplies with some of them
        params = params | {"head": params["embedding"]}
    put = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), params, _specs(params))
    return of._replace(params=put, config=dataclasses.replace(of.config, tied=False)), mesh


def _specs(params):
    stacked = isinstance(params["layers"], dict)

    def spec(path, leaf):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        layer, name = (None,) if stacked and names[0] == "layers" else (), names[-1]
        if leaf.ndim < len(layer) + 2 or name not in OUTPUTS + INPUTS:
            return P()
        return P(*layer, AXIS, None) if name in OUTPUTS else P(*layer, None, AXIS)

    return jax.tree.map_with_path(spec, params)


def _shard_linear(linear):
    def product(x, w, *, residual=None, **parts):
        y = linear(x, w, **parts)
        return y if residual is None else residual + jax.lax.psum(y, AXIS)  # the products that INPUTS names

    return product


def _shard_step(params, tokens, count, position, cache, key, temperature, top_p, config):
    """decode.step, of the part that a device has."""
    linear = _shard_linear(decode.LINEAR[config.activations])
    logits, cache = model.forward(params, tokens, config, linear, cache, position, last=count - 1)
    logits = jax.lax.all_gather(logits[0], AXIS, tiled=True)
    token = decode.sample(logits, jax.random.fold_in(key, position + count), temperature, top_p)
    return token.astype(jnp.int32)[None], position + count, cache


def _of_sequences(step):
    """A step of several, which are at the same position."""

    def each(params, tokens, count, position, cache, key, temperature, top_p, config):
        config = dataclasses.replace(config, sequences=len(tokens))

        def one(tokens, position, cache):
            return step(params, tokens, count, position, cache, key, temperature, top_p, config)

        return jax.vmap(one, (0, None, 0), (0, None, 0))(tokens, position, cache)

    return each


def program(params, batch: int, steps: int, mesh: Mesh | None = None):
    """decode.step, of one or several sequences, tokens a call and devices."""
    one = decode.step if mesh is None else _shard_step
    made = decode.several(one if batch == 1 else _of_sequences(one), steps)
    if mesh is None:
        return decode.jitted(made, params)

    def over_devices(params, tokens, count, position, cache, key, temperature, top_p, config):
        n = mesh.size
        config = dataclasses.replace(config, n_heads=config.n_heads // n, n_kv_heads=config.n_kv_heads // n)

        def here(params, tokens, count, position, cache, key):
            return made(params, tokens, count, position, cache, key, temperature, top_p, config)

        heads = _cache_spec(batch)
        specs = _specs(params), P(), P(), P(), heads, P()
        out = P(), P(), heads, P()
        of_devices = jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return of_devices(params, tokens, count, position, cache, key)

    return decode.jitted(over_devices, params)


def _cache_spec(batch: int) -> P:
    return P(AXIS) if batch == 1 else P(None, AXIS)


def _random_cache(of: Model, batch: int, size: int, mesh: Mesh | None):
    lead = () if batch == 1 else (batch,)
    sharding = None if mesh is None else NamedSharding(mesh, _cache_spec(batch))
    shapes = jax.eval_shape(lambda: model.empty_cache(of.params, of.config, size=size))

    @functools.partial(jax.jit, out_shardings=sharding)
    def make(key):
        return jax.tree.map(lambda a: jax.random.normal(key, (*lead, *a.shape), a.dtype), shapes)

    return make(jax.random.key(1))


def measure(of: Model, batch: int, context: int, plan: Plan, mesh: Mesh | None = None) -> Timed:
    """Tokens after the first `context`. Only the last is waited for, as each step takes the token where it is."""
    cache = _random_cache(of, batch, plan.size(context), mesh)
    tokens = jnp.zeros((1,) if batch == 1 else (batch, 1), jnp.int32)
    begin, one, key = jnp.int32(context), jnp.int32(1), jax.random.key(0)
    if mesh is not None:
        tokens, begin, one, key = jax.device_put((tokens, begin, one, key), NamedSharding(mesh, P()))
    start = time.perf_counter()
    arrays = jax.tree.leaves(of.params)
    loop = program(of.params, batch, plan.steps, mesh)
    lowered = loop.lower(arrays, tokens, one, begin, cache, key, None, None, of.config)
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start

    def run(calls: int) -> tuple[float, float]:
        """Seconds until the tokens were there, and until all was asked for."""
        nonlocal tokens, cache
        position = jax.block_until_ready(jnp.copy(begin))  # as a call takes its buffer
        start = time.perf_counter()
        for _ in range(calls):
            tokens, position, cache, _ = compiled(arrays, tokens, one, position, cache, key, None, None)
        asked = time.perf_counter() - start
        jax.block_until_ready((tokens, cache))
        return time.perf_counter() - start, asked

    calls = max(1, plan.tokens // plan.steps)
    run(_WARM_UP)
    rounds, began = [], time.perf_counter()
    while len(rounds) < plan.rounds and (len(rounds) < 2 or time.perf_counter() - began < _LONG):
        rounds.append(run(calls))
    scale = 1e6 / (calls * plan.steps)
    seconds, asked = zip(*rounds)
    us = scale * statistics.median(seconds)
    found, note = [], None
    try:
        on_cpu = next(iter(tokens.devices())).platform == "cpu"
        found = decode_trace.profile(lambda: run(plan.traced), compiled.as_text() if on_cpu else None)
    except (OSError, RuntimeError, ValueError) as error:
        note = f"no profile: {error}"
    return Timed(
        us=us,
        rounds_us=[scale * each for each in seconds],
        enqueue_us=scale * statistics.median(asked),
        compile_s=compile_s,
        split=decode_trace.split(found, plan.traced * plan.steps, us),
        note=note,
    )
