"""The read floor: how long the device takes to read as many bytes and do nothing with them."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.native import Native

# CTAs per SM (0: as many as there is work), threads: the best one counts.
GRIDS = ((0, 128), (0, 256), (0, 512), (0, 1024), (8, 128), (4, 256))
_REPLAYS = 3


class GpuFloor:
    """A kernel that only reads (floor.cu), in a captured graph as jaxgemv's kernels are timed."""

    how = "a kernel that only reads as many bytes (within 0.4%), best of several grids, in a captured CUDA graph"

    def __init__(self, library: Native, calls: int):
        self._library, self._calls, self._seen = library, calls, {}
        self.empty_us = self.us(16)  # what any call costs

    def us(self, nbytes: int) -> float:
        # To 8 significant bits: x in another dtype, or a few scales more, is no reason to measure again.
        unit = 1 << max(4, nbytes.bit_length() - 8)
        nbytes = max(16, (nbytes + unit // 2) // unit * unit)
        if nbytes not in self._seen:
            reads = (self._library.read_us(nbytes, self._calls, _REPLAYS, grid) for grid in GRIDS)
            self._seen[nbytes] = min(reads)
        return self._seen[nbytes]


class NoFloor:
    """Where the native part of the benchmark cannot be built; `missing` says why."""

    empty_us = None

    def __init__(self, missing: str):
        self.how = f"n/a, {missing}"

    def us(self, nbytes: int) -> None:
        return None


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

    def us(self, nbytes: int) -> float:
        return nbytes / self._rate * 1e6
