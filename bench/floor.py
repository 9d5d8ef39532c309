"""The read floor: how long the device takes to read as many bytes and do nothing with them."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import Plan, compile_chain, measure

_HERE = Path(__file__).parent
_TARGET = "jaxgemv_bench_read"

# CTAs per SM (0: one round for each thread), threads, 16-byte loads in flight per thread: the best one counts.
GRIDS = ((2, 1024, 4), (0, 256, 4), (1, 1024, 4), (2, 1024, 2), (8, 256, 2), (0, 512, 4))


class GpuFloor:
    """A kernel that only reads (floor.cu), timed in a jit like every system; `missing` says why there is none."""

    how = "a kernel that only reads, best of several grids, timed in jit like the rest"

    def __init__(self, device, plan: Plan, grids=GRIDS):
        self.plan, self.grids, self._seen = plan, grids, {}
        self.empty_us = None  # a call that reads 16 bytes: what any call costs
        self.missing = _register(device)
        if not self.missing:
            try:
                self.empty_us = self._measure(4, grids[-1:])
            except jax.errors.JaxRuntimeError as error:
                self.missing = f"floor.cu does not run: {str(error).splitlines()[0]}"

    def us(self, nbytes: int) -> float | None:
        if self.missing:
            return None
        words = -(-nbytes // 16) * 4
        if words not in self._seen:
            self._seen[words] = self._measure(words, self.grids)
        return self._seen[words]

    def _measure(self, words: int, grids) -> float:
        keys = jax.random.split(jax.random.key(1, impl="rbg"), self.plan.copies(4 * words))
        copies = [_random_words(key, words) for key in keys]
        x = jnp.zeros((1, 1), jnp.float16)  # stands for the x that ties a product to the one before
        repeats = max(3, self.plan.repeats // 2)
        programs = [compile_chain(partial(_read, grid=grid), "gpu") for grid in grids]
        return min(measure(p, x, copies, self.plan, repeats).us for p in programs)


def _read(after, words, *, grid):
    ctas_per_sm, threads, unroll = map(np.int64, grid)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((1,), jnp.uint32))
    return call(after, words, ctas_per_sm=ctas_per_sm, threads=threads, unroll=unroll)


@partial(jax.jit, static_argnames="words")
def _random_words(key, words):
    return jax.random.bits(key, (words,), jnp.uint32)


def _register(device) -> str | None:
    """Compiles floor.cu, once, and registers its handler; or says why not."""
    compiler = nvcc()
    if compiler is None:
        return "no nvcc on PATH or in CUDA_HOME"
    arch = "sm_" + str(device.compute_capability).replace(".", "")
    options = ["-O3", "-std=c++17", f"-arch={arch}", "-shared", "-Xcompiler=-fPIC"]
    options += ["-isystem", jax.ffi.include_dir()]
    source = _HERE / "floor.cu"
    recipe = f"{options} {jax.__version__}".encode() + source.read_bytes()
    library = _HERE / ".cache" / f"floor-{hashlib.sha256(recipe).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *options, str(source), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"nvcc failed: {done.stderr.strip()[-500:]}"
        unfinished.replace(library)
    handler = getattr(ctypes.CDLL(str(library)), _TARGET)
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="CUDA")
    return None


def nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin/nvcc").exists():
            return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


class CpuFloor:
    """Bytes over the best bandwidth at which numpy, on all threads, reduces memory that no cache holds."""

    empty_us = missing = None

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
