"""How a product is timed in jit: many calls in one program, each on the next copy of the weights."""

import statistics
import time
from itertools import cycle, islice
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bench import native


class Plan(NamedTuple):
    """How many calls to put into one program, and how long to measure."""

    rotate: float  # bytes of weights that pass between two reads of the same copy: many times the cache
    copies_range: tuple[int, int]  # at least, at most; fewer only where `memory` forbids
    calls: int  # in one program, at least
    memory: float  # bytes that all copies together may take
    repeats: int
    executions: int  # of the program, at most, between two looks at the host's clock

    def copies(self, nbytes: int) -> int:
        fewest, most = self.copies_range
        wanted = min(max(-(-int(self.rotate) // nbytes), fewest), most)
        return max(2, min(wanted, int(self.memory) // nbytes))

    def sequence(self, copies: list) -> list:
        """The weight of each call."""
        return list(islice(cycle(copies), max(self.calls, len(copies))))


class Sample(NamedTuple):
    us: float  # one call, median of the repeats
    spread: float  # interquartile range of the repeats over their median
    enqueue_us: float | None  # what one call took the host: if that is nearly `us`, the device had to wait
    calls: int  # in one program


def _chain(product, x, weights, feed: bool) -> list:
    """The products of x with every weight, one after the other as a decoder needs them.

    feed: each x really needs the y before it, at the price of an addition. Where there is more than one queue (threads
    of a CPU, the network between GPUs) XLA would otherwise run the calls side by side.
    """
    product = jax.jit(product)  # traced once
    ys = []
    for w in weights:
        # XLA merges products of the same x, and would prepare a weight that comes twice only once. The barriers
        # keep the calls apart and in order, and cost nothing: they are gone from the compiled program.
        if not feed:
            x, w = jax.lax.optimization_barrier((x, w))
        y = product(x, w)
        x, y = jax.lax.optimization_barrier((x, y))
        if feed:
            x = x + (y[..., :1].astype(jnp.float32) * 1e-30).astype(x.dtype)
        ys.append(y)
    return ys


def measure_on_device(product, x, copies, plan: Plan, library: native.Native) -> tuple[jax.Array, Sample]:
    """(y of the last call, the time of one): device time between events around the calls, all in one jit.

    Gaps between the calls are in it: that is what a user of jit gets. Everything is cold: the L2 is emptied first, and
    a copy that comes again has been followed by `plan.rotate` bytes of others.
    """

    def program(x, copies, scratch):
        start = jax.ffi.ffi_call(native.START, jax.ShapeDtypeStruct(x.shape, x.dtype))
        stop = jax.ffi.ffi_call(native.STOP, jax.ShapeDtypeStruct((1,), jnp.uint32))
        ys = _chain(product, start(x, scratch), plan.sequence(copies), feed=False)
        return ys[-1], stop(*ys)

    program = jax.jit(program)
    calls = len(plan.sequence(copies))
    times = []
    for repeat in range(-2, plan.repeats):  # the first runs compile, tune and record a CUDA graph
        out = None  # so that the same memory is free again, and XLA need not update its graph
        out = jax.block_until_ready(program(x, copies, library.scratch))
        if repeat >= 0:
            times.append(library.elapsed_us())
        if len(times) >= 2 and sum(times) > 200e3:
            break  # slow enough to be steady
    return out[0], Sample(statistics.median(times) / calls, spread(times), None, calls)


def measure_on_host(product, x, copies, plan: Plan, *, feed: bool) -> tuple[jax.Array, Sample]:
    """(y of the last call, the time of one), by the host's clock. Its gaps to the next call are in it."""
    weights = plan.sequence(copies)
    program = jax.jit(lambda x, copies: _chain(product, x, plan.sequence(copies), feed))

    def run(executions: int) -> tuple[float, float]:
        out = None
        start = time.perf_counter()
        for _ in range(executions):
            # Let go of the last outputs first: with the same addresses again, XLA need not update its CUDA graph.
            out = None
            out = program(x, copies)
        enqueued = time.perf_counter()
        jax.block_until_ready(out)
        return time.perf_counter() - start, enqueued - start

    y = program(x, copies)[-1]  # compiles, tunes
    run(1)
    once = min(run(1)[0], run(1)[0])  # the first of these may still capture
    executions = max(1, min(plan.executions, round(20e-3 / once)))
    times, enqueued, deadline = [], [], time.perf_counter() + 3
    for _ in range(plan.repeats):
        total, enqueue = run(executions)
        times.append(total)
        enqueued.append(enqueue)
        if len(times) >= 3 and time.perf_counter() > deadline:
            break  # slow enough to be steady
    per_call = 1e6 / (executions * len(weights))
    return y, Sample(
        us=statistics.median(times) * per_call,
        spread=spread(times),
        enqueue_us=statistics.median(enqueued) * per_call if executions > 1 else None,
        calls=len(weights),
    )


def spread(times: list[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / statistics.median(times)
