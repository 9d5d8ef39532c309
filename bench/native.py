"""The native parts of the benchmark: the read floors, a stopwatch for jitted programs, the rules of `choose.h`."""

import ctypes
import hashlib
import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

START, STOP = "jaxgemv_bench_start", "jaxgemv_bench_stop"  # FFI targets

_HERE = Path(__file__).parent
_CUDA = _HERE.parent / "csrc/cuda"


class _Scratch(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Native:
    """The compiled sources, and `scratch`: random memory that is read to empty the L2, or to time reading."""

    def __init__(self, library: ctypes.CDLL, scratch_bytes: int):
        self._library = library
        for name, result in (
            ("reads", ctypes.c_float),
            ("elapsed", ctypes.c_float),
            ("error", ctypes.c_char_p),
        ):
            getattr(library, f"jaxgemv_bench_{name}").restype = result
        for target in (START, STOP):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="CUDA")
        key = jax.random.key(1, impl="rbg")
        self.scratch = jax.jit(lambda: jax.random.bits(key, (scratch_bytes // 4,), jnp.uint32))()
        self._scratch = _Scratch(self.scratch.unsafe_buffer_pointer(), self.scratch.nbytes)

    def elapsed_us(self) -> float:
        """From START to STOP in the program that ran last."""
        return self._checked(self._library.jaxgemv_bench_elapsed())

    def read_us(self, nbytes: int, calls: int, replays: int, grid: tuple[int, int]) -> float:
        """One read of that many bytes, in a graph of `calls` reads."""
        size, ctas_per_sm, threads = map(_long, (nbytes, *grid))
        read = self._library.jaxgemv_bench_reads
        return self._checked(read(self._scratch, size, calls, replays, ctas_per_sm, threads))

    def _checked(self, us: float) -> float:
        if us < 0:
            raise RuntimeError(self._library.jaxgemv_bench_error(int(-us)).decode())
        return us


class HostClock:
    """The stopwatch of Native, for a CPU. scratch: what is read to empty the caches."""

    def __init__(self, library: ctypes.CDLL, scratch_bytes: int):
        self._elapsed = library.jaxgemv_bench_elapsed
        self._elapsed.restype = ctypes.c_double
        for target in (START, STOP):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        self.scratch = jnp.ones((scratch_bytes // 4,), jnp.uint32)

    def elapsed_us(self) -> float:
        return self._elapsed()


def load(device) -> tuple[ctypes.CDLL | None, str | None]:
    """Compiles the read floor and the stopwatch of a GPU, once: (library, None) or (None, why not)."""
    compiler = nvcc()
    if compiler is None:
        return None, "no nvcc on PATH or in CUDA_HOME"
    arch = str(device.compute_capability).replace(".", "")
    options = ["-O3", "-std=c++20", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    options += ["-shared", "-Xcompiler=-fPIC", "-isystem", jax.ffi.include_dir()]
    sources = _HERE / "clock.cu", _HERE / "floor.cu"
    recipe = hashlib.sha256(f"{options} {jax.__version__}".encode())
    for file in (*sources, *sorted(_HERE.glob("*.h"))):
        recipe.update(file.read_bytes())
    return _compiled([compiler, *options, *map(str, sources)], recipe.hexdigest())


def load_reader() -> tuple[ctypes.CDLL | None, str | None]:
    """Compiles the read floor and the stopwatch of a CPU, for this one: (library, None) or (None, why not)."""
    return _for_host(["-O3", "-march=native", "-pthread"], [_HERE / "read.cc", _HERE / "clock.cc"])


def load_chooser(backend: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Compiles the rules by which a backend chooses kernels: (library, None) or (None, why not)."""
    folder = _CUDA.parent / backend
    options = ["-O1", f'-DJAXGEMV_CHOOSE="{folder / "choose.h"}"', f"-DJAXGEMV_BACKEND={backend}"]
    headers = *sorted(folder.rglob("*.h")), *sorted(_CUDA.parent.glob("*.h"))
    return _for_host(options, [_HERE / "choose.cc"], headers)


def _for_host(
    options: list[str], sources: list[Path], headers: Sequence[Path] = ()
) -> tuple[ctypes.CDLL | None, str | None]:
    """headers: those that may change."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        return None, "no C++ compiler in $CXX or on PATH"
    command = [compiler, *options, "-std=c++20", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    command += map(str, sources)
    recipe = hashlib.sha256(f"{command} {platform.node()} {jax.__version__}".encode())
    for file in (*sources, *headers):
        recipe.update(file.read_bytes())
    return _compiled(command, recipe.hexdigest())


def _compiled(command: list[str], recipe: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Runs a compiler, unless it has made this library before."""
    path = _HERE / ".cache" / f"bench-{recipe[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if done.returncode:
            return None, f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}"
        unfinished.replace(path)
    return ctypes.CDLL(str(path)), None


def nvcc() -> str | None:
    """As the build finds it."""
    return runpy.run_path(str(_HERE.parent / "cmake/find_nvcc.py"))["find_nvcc"]()


def _long(value: int):
    return ctypes.c_int64(value)
