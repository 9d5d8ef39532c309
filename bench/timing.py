"""How a system is timed in jit: many calls in one program, each on the next copy of the weights."""

import statistics
import time
from typing import NamedTuple

import jax


class Plan(NamedTuple):
    """How many calls to put into one jit, and how long to measure."""

    rotate: float  # bytes of weights that pass between two reads of the same copy: many times the cache
    copies_range: tuple[int, int]  # at least, at most; fewer only where `memory` forbids
    calls: int  # in one jit, at least: fewer arguments a call, so that the host keeps ahead of the device
    memory: float  # bytes that all copies together may take
    repeats: int
    executions: int  # of the jit, at most, between two looks at the clock

    def copies(self, nbytes: int) -> int:
        fewest, most = self.copies_range
        wanted = min(max(-(-int(self.rotate) // nbytes), fewest), most)
        return max(2, min(wanted, int(self.memory) // nbytes))

    def rounds(self, copies: int) -> int:
        return -(-self.calls // copies)


class Sample(NamedTuple):
    us: float  # one call, median of the repeats
    spread: float  # interquartile range of the repeats over their median
    enqueue_us: float | None  # what one call took the host: if that is nearly `us`, the device had to wait
    calls: int  # in one jit


def compile_chain(product, platform: str, plan: Plan):
    """The products of x with every copy, one after the other as a decoder needs them: jit of (x, copies)."""

    def products(x, copies):
        ys = []
        for w in copies * plan.rounds(len(copies)):
            y = product(x, w)
            # XLA merges products of the same x. The barrier keeps them apart and in order, and costs nothing: it
            # is gone from the compiled program.
            x, y = jax.lax.optimization_barrier((x, y))
            if platform == "cpu":
                # There XLA would also run them side by side. Next to a product this is nothing.
                x = x + (y[..., :1] * 1e-30).astype(x.dtype)
            ys.append(y)
        return ys

    return jax.jit(products)


def measure(program, x, copies, plan: Plan, repeats: int | None = None) -> Sample:
    """The time of one call. Its gaps to the next call are in it: that is what a user of jit gets."""

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

    run(1)  # compiles, tunes
    once = min(run(1)[0], run(1)[0])  # the first of these may still capture
    executions = max(1, min(plan.executions, round(20e-3 / once)))
    times, enqueued, deadline = [], [], time.perf_counter() + 3
    for _ in range(repeats or plan.repeats):
        total, enqueue = run(executions)
        times.append(total)
        enqueued.append(enqueue)
        if len(times) >= 3 and time.perf_counter() > deadline:
            break  # slow enough to be steady
    calls = len(copies) * plan.rounds(len(copies))
    per_call = 1e6 / (executions * calls)
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Sample(
        us=median * per_call,
        spread=(high - low) / median,
        enqueue_us=statistics.median(enqueued) * per_call if executions > 1 else None,
        calls=calls,
    )
