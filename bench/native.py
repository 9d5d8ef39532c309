"""The native part of the GPU benchmark: the read kernel (floor.cu), and timing in a captured graph (graph.cu)."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import jax

READ = "jaxgemv_bench_read"  # FFI target of the read kernel

_HERE = Path(__file__).parent
_CUDA = _HERE.parent / "csrc/cuda"
_SOURCES = (_HERE / "floor.cu", _HERE / "graph.cu", _CUDA / "kernels.cu")


def load(device) -> tuple[ctypes.CDLL | None, str | None]:
    """Compiles the sources, once, together with the package's kernels: (library, None) or (None, why not)."""
    compiler = nvcc()
    if compiler is None:
        return None, "no nvcc on PATH or in CUDA_HOME"
    arch = "sm_" + str(device.compute_capability).replace(".", "")
    options = ["-O3", "-std=c++20", f"-arch={arch}", "-shared", "-Xcompiler=-fPIC"]
    options += ["-isystem", jax.ffi.include_dir()]
    recipe = hashlib.sha256(f"{options} {jax.__version__}".encode())
    for source in sorted(
        [*_HERE.glob("*.*u*"), _HERE / "floor.h", *_CUDA.glob("*"), *_CUDA.parent.glob("*.h")]
    ):
        recipe.update(source.read_bytes())
    path = _HERE / ".cache" / f"bench-{recipe.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *options, *map(str, _SOURCES), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return None, f"nvcc failed: {done.stderr.strip()[-500:]}"
        unfinished.replace(path)
    library = ctypes.CDLL(str(path))
    library.jaxgemv_bench_products.restype = ctypes.c_float
    library.jaxgemv_bench_reads.restype = ctypes.c_float
    jax.ffi.register_ffi_target(READ, jax.ffi.pycapsule(getattr(library, READ)), platform="CUDA")
    return library, None


def nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin/nvcc").exists():
            return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def graph_reads(library, copies, words: int, grid) -> float:
    """Microseconds of one read of `words` words, in a graph of one read of each copy."""
    out = jax.numpy.zeros(1, "uint32")
    return _checked(
        library.jaxgemv_bench_reads(_long(words), len(copies), _pointers(copies), _at(out), *map(_long, grid))
    )


def graph_products(library, x, copies, y) -> float:
    """Microseconds of one product of x, in a graph of one with each copy (QuantizedTensors); y is scratch."""
    w = copies[0]
    n, k = w.shape
    groups = w.scale.shape[-1] if w.scale.ndim == 2 else 0
    zeros = [_at(c.zero) if c.zero is not None else None for c in copies]
    return _checked(
        library.jaxgemv_bench_products(
            *map(_long, (x.shape[0], n, k)),
            w.bits,
            _long(-(-k // groups) if groups else 0),
            int(x.dtype == "bfloat16"),
            _at(x),
            _at(y),
            len(copies),
            _pointers([c.packed for c in copies]),
            _pointers([c.scale for c in copies]),
            (ctypes.c_void_p * len(copies))(*zeros),
        )
    )


def _long(value: int):
    return ctypes.c_int64(value)


def _at(array):
    return ctypes.c_void_p(jax.block_until_ready(array).unsafe_buffer_pointer())


def _pointers(arrays):
    return (ctypes.c_void_p * len(arrays))(*[_at(a) for a in arrays])


def _checked(us: float) -> float:
    if us < 0:
        raise RuntimeError("bench: a kernel failed while it was timed in a graph")
    return us
