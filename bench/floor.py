"""The read floor: how long the device takes to read as many bytes and do nothing with them."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench import native
from bench.timing import Plan, compile_chain, measure

# CTAs per SM (0: one round for each thread), threads, 16-byte loads in flight per thread: the best one counts.
GRIDS = ((2, 1024, 4), (0, 256, 4), (1, 1024, 4), (2, 1024, 2), (8, 256, 2), (0, 512, 4))


class GpuFloor:
    """A kernel that only reads (floor.cu), timed like the systems: in a jit, and in a captured graph."""

    how = "a kernel that only reads, best of several grids, timed the same way"

    def __init__(self, plan: Plan, library, grids=GRIDS):
        self.plan, self.grids, self._seen = plan, grids, {}
        self._library = library
        self.empty_us = self._in_jit(4, grids[-1:])  # a call that reads 16 bytes: what any call costs

    def us(self, nbytes: int) -> tuple[float | None, float | None]:
        """(in jit, in a graph)"""
        words = -(-nbytes // 16) * 4
        if words not in self._seen:
            self._seen[words] = self._in_jit(words, self.grids), self._in_graph(words)
        return self._seen[words]

    def _copies(self, words: int):
        keys = jax.random.split(jax.random.key(1, impl="rbg"), self.plan.copies(4 * words))
        return [_random_words(key, words) for key in keys]

    def _in_jit(self, words: int, grids) -> float:
        copies = self._copies(words)
        x = jnp.zeros((1, 1), jnp.float16)  # stands for the x that ties a product to the one before
        repeats = max(3, self.plan.repeats // 2)
        programs = [compile_chain(partial(_read, grid=grid), "gpu", self.plan) for grid in grids]
        return min(measure(p, x, copies, self.plan, repeats).us for p in programs)

    def _in_graph(self, words: int) -> float:
        copies = self._copies(words)
        return min(native.graph_reads(self._library, copies, words, grid) for grid in self.grids)


def _read(after, words, *, grid):
    ctas_per_sm, threads, unroll = map(np.int64, grid)
    call = jax.ffi.ffi_call(native.READ, jax.ShapeDtypeStruct((1,), jnp.uint32))
    return call(after, words, ctas_per_sm=ctas_per_sm, threads=threads, unroll=unroll)


@partial(jax.jit, static_argnames="words")
def _random_words(key, words):
    return jax.random.bits(key, (words,), jnp.uint32)


class NoFloor:
    """Where the native part of the benchmark cannot be built; `missing` says why."""

    how = "n/a"
    empty_us = None

    def __init__(self, missing: str):
        self.how = f"n/a, {missing}"

    def us(self, nbytes: int) -> tuple[None, None]:
        return None, None


class CpuFloor:
    """Bytes over the best bandwidth at which numpy, on all threads, reduces memory that no cache holds."""

    empty_us = None

    def __init__(self, megabytes: int = 512):
        threads = os.cpu_count() or 1
        data = np.random.default_rng(0).integers(0, 1 << 63, megabytes << 17, dtype=np.uint64)
        chunks = np.array_split(data, megabytes // 8)
        rates = []
        with ThreadPoolExecutor(threads) as pool:  # reductions let go of the GIL
            for reduce in (np.bitwise_or.reduce, np.add.reduce):
                for _ in range(6):
                    start = time.perf_counter()
                    list(pool.map(reduce, chunks))
                    rates.append(data.nbytes / (time.perf_counter() - start))
        self._rate = max(rates)
        self.how = (
            f"bytes / {self._rate / 1e9:.1f} GB/s, a numpy reduction of {megabytes} MB on {threads} threads"
        )

    def us(self, nbytes: int) -> tuple[float, None]:
        return nbytes / self._rate * 1e6, None
