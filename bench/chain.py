"""How the grid times a product: calls that feed each other in one program, between the two calls of a stopwatch.

Each x has an element that comes from the y before it, so that no call can start early or be left out. Writing it is one
operation of one element, the same for every product; what such links take by themselves is measured once and
subtracted. Caches are emptied before the first call and no two calls have the same copy of the weight, so all is cold.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import native
from bench.timing import Sample, spread

_LINKS = 32


class Plan(NamedTuple):
    """How much to put into one program, and how often to run it."""

    bytes: float  # of all copies of a weight
    flops: float  # of all calls, about
    calls: int  # at most
    flush: float  # bytes that are read to empty the caches
    warm_up: int  # executions: the first ones of a GPU tune, and record a CUDA graph
    repeats: int
    enough_us: float  # of all repeats: then there are no more

    def count(self, weight_bytes: int, flops: int) -> int:
        """Calls in one program."""
        return int(max(1, min(self.bytes / weight_bytes, self.flops / flops, self.calls)))


PLANS = {
    "gpu": Plan(bytes=5e8, flops=3e12, calls=32, flush=512e6, warm_up=3, repeats=9, enough_us=100e3),
    "cpu": Plan(bytes=256e6, flops=1e9, calls=16, flush=256e6, warm_up=1, repeats=5, enough_us=150e3),
}


def program(product: Callable, x, weights: list, scratch):
    """The compiled (x, weights, scratch) -> (y of the last call, what the stopwatch left); of arrays, or their shapes.

    Compiling is all that happens here, so that threads can do it side by side.
    """

    def run(x, weights, scratch):
        call, first = jax.jit(product), x[:1, :1]  # the product is traced once
        x = jax.ffi.ffi_call(native.START, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, scratch)
        y = x
        for w in weights:
            # The barriers keep a product from being merged with others, or cut down to what the link needs. They are
            # gone from the compiled program.
            x, w = jax.lax.optimization_barrier((x, w))
            x, y = jax.lax.optimization_barrier((x, call(x, w)))
            # y is finite, and this adds 0 to an element of x, which XLA cannot know.
            fed = first + (y[:1, :1].astype(jnp.float32) * 1e-30).astype(x.dtype)
            x = jax.lax.dynamic_update_slice(x, fed, (0, 0))
        return y, jax.ffi.ffi_call(native.STOP, jax.ShapeDtypeStruct((1,), jnp.uint32))(x)

    return jax.jit(run).lower(x, weights, scratch).compile()


def measure(compiled, x, weights: list, clock, plan: Plan, link_us: float = 0) -> tuple[jax.Array, Sample]:
    """(y of the last call, the time of one): the stopwatch's, median of the repeats."""
    times, out = [], None
    for repeat in range(-plan.warm_up, plan.repeats):
        del out  # so that the same memory is free again, and XLA need not update its CUDA graph
        out = jax.block_until_ready(compiled(x, weights, clock.scratch))
        if repeat >= 0:
            times.append(clock.elapsed_us())
        if sum(times) > plan.enough_us * (10 if len(times) == 1 else 1):
            break  # slow enough to be steady
    us = max(0.0, statistics.median(times) / len(weights) - link_us)
    return out[0], Sample(us, spread(times) if len(times) > 1 else 0.0, None, len(weights))


def link_us(dtype: str, clock, plan: Plan) -> float:
    """What a link takes: the time of calls that do nothing."""
    x = jnp.zeros((1, 256), dtype)
    ys = [jnp.array(np.zeros((1, 256)), dtype) for _ in range(_LINKS)]
    compiled = program(lambda x, y: y, x, ys, clock.scratch)
    return measure(compiled, x, ys, clock, plan)[1].us
