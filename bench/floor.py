"""The read floor: how long the device takes to read as many bytes and do nothing with them."""

import ctypes

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
    """Threads that only read (read.cc). Every call measures, beside what it is compared with."""

    empty_us = None

    def __init__(self, library: ctypes.CDLL, threads: int, total: int):
        self._read, self._threads = library.jaxgemv_bench_read, threads
        self._read.restype = ctypes.c_double
        self._data = np.random.default_rng(0).integers(0, 1 << 63, total // 8, dtype=np.uint64)
        self.how = (
            f"{threads} threads that only read as many bytes from {total >> 20} MiB, measured beside each row"
        )

    def us(self, nbytes: int) -> float:
        calls = max(21, min(501, int(1e9) // nbytes))
        size = [ctypes.c_int64(each) for each in (self._data.nbytes, nbytes)]
        return self._read(ctypes.c_void_p(self._data.ctypes.data), *size, self._threads, calls)
