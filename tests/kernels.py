"""The kernels by name: which there are, calls that all of them can make, and how one alone may run."""

import contextlib
from functools import partial
from typing import NamedTuple

import jax
import pytest

from jaxgemv import _ffi, gemv
from jaxgemv._ffi import Kernel, WeightLimits, backends, cpu_isas, set_cpu_isa, use_only

FLOATS = ["float16", "bfloat16", "float32"]
# What a code stands for, of csrc/format.h.
FORMATS = ["affine", "codebook", "float8_e4m3fn", "float8_e5m2"]

# Tests of the backends that have kernels; `backend` alone is these and the reference.
compiled = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)

# Instruction sets of the CPU that this processor has; its table of kernels is that of the one in use.
ISAS = cpu_isas()


def set_loop_rows(monkeypatch, platform: str, rows: int) -> None:
    """XLA's own loop up to so many rows of x, beside any weight."""
    backend = backends[platform]

    def limits(*given):
        return WeightLimits(*backend.weight_limits(*given))._replace(loop_rows=rows)

    monkeypatch.setitem(backends, platform, backend._replace(weight_limits=limits))


class KernelParam(NamedTuple):
    """A row of a backend's table, on the CPU with an instruction set; backend "xla" is the reference."""

    backend: str
    isa: str
    name: str
    bits: int
    x: str
    operands: frozenset[str] = frozenset()
    format: str = "affine"

    def __str__(self) -> str:
        kinds = {"affine": f"int{self.bits}", "codebook": f"codebook{self.bits}"}
        parts = self.backend, self.isa, self.name, kinds.get(self.format, self.format), self.x
        return "-".join(filter(None, parts))


def most_rows(kernel: KernelParam) -> int | None:
    """Of x, where a kernel has a limit that depends on its type or on the width."""
    if kernel.name != "stream":
        return None
    if kernel.x == "float32":
        return 1
    return 2 if kernel.format == "affine" and kernel.bits not in (2, 4, 8) else None


# The same by XLA.
REFERENCE = [
    KernelParam("xla", "", "", bits, x) for bits, x in ((3, "float32"), (4, "bfloat16"), (8, "float16"))
]


# Those that take a norm only where what is normalised may be rounded to x's dtype: test_round_norm.py.
ROUNDED_NORM = {"bf16_dot", "bf16_panel", "bf16_weights", "amx_bf16", "amx_panel"}


def kernels(transposed: bool, formats=("affine",), xs=FLOATS) -> list[KernelParam]:
    """Every row of every table, of these formats and these x, with the operands that it takes in any case."""

    def operands(k: Kernel) -> frozenset[str]:
        return k.operands - {"norm"} if k.name in ROUNDED_NORM else k.operands

    tables = [("cuda", "", backends["cuda"].kernels)]
    for isa in reversed(ISAS):  # so that the best one stays
        set_cpu_isa(isa)
        tables.insert(0, ("cpu", isa, backends["cpu"].kernels))
    return [
        KernelParam(backend, isa, k.name, k.bits, k.x, operands(k), k.format)
        for backend, isa, table in tables
        for k in table
        if k.transposed == transposed and k.format in formats and k.x in xs
    ]


# One program runs with several kernels, one after the other, and a CUDA graph keeps the first.
NO_GRAPH = {"xla_gpu_graph_min_graph_size": 1 << 30}


@partial(jax.jit, static_argnames=("backend", "isa"), compiler_options=NO_GRAPH)
def products(args, backend: str, isa: str = "") -> list[jax.Array]:
    """Of (x, w, bias) or (x, w, bias, index) each; in one program, since compiling takes most of a test's time.

    Instruction sets share programs, but for those that are given theirs: up to how many rows kernels are called
    is a program's, from when it was compiled.
    """
    return [
        gemv(x, w, bias=bias, index=index[0] if index else None, out_dtype="float32", implementation=backend)
        for x, w, bias, *index in args
    ]


def transposed(ct, w, k: int, implementation, *, out="float32", index=None) -> jax.Array:
    """What `ct`, a cotangent of gemv's result, makes of x: one transposed product."""
    x = jax.ShapeDtypeStruct((*ct.shape[:-1], k), jax.numpy.dtype(out))
    f = jax.linear_transpose(
        lambda x: gemv(x, w, index=index, out_dtype=ct.dtype, implementation=implementation), x
    )
    return f(jax.numpy.asarray(ct))[0]


@partial(jax.jit, static_argnames=("ks", "backend"), compiler_options=NO_GRAPH)
def transposed_products(args, ks, backend: str) -> list[jax.Array]:
    """Of (ct, w) each, and the K of each."""
    return [transposed(ct, w, k, backend) for (ct, w), k in zip(args, ks)]


ROUNDING = {"gemm", "gemm_tma", "bf16_weights"}  # kernels that round weights to x's dtype
HOPPER = {"wgmma", "wgmma_any", "wgmma_tma", "gemm", "gemm_tma"}
_OF_TABLES = {"stream", "direct", "mma_any", "wgmma_any", "wgmma_tma"}


def holds_entries(kernel: KernelParam) -> bool:
    """Whether a kernel holds a table's entries to 2^-14 of the largest."""
    return kernel.format == "codebook" and kernel.name in _OF_TABLES and kernel.x != "float32"


def is_wide_table(kernel: KernelParam) -> bool:
    """Of `stream` tables beside float32 x, which have two entries for each byte in shared memory."""
    return (kernel.name, kernel.format, kernel.x) == ("stream", "codebook", "float32")


def has_large_shared() -> bool:
    """Whether the GPU has room for these."""
    return jax.devices("cuda")[0].compute_capability.startswith(("9.", "10."))


@contextlib.contextmanager
def on(backend: str, isa: str = "", name: str = ""):
    """Arrays made by the test live where the backend runs, also on a machine with a GPU; and no other kernel runs."""
    if backend in backends and backends[backend].missing:
        pytest.fail(f"the {backend} backend is {backends[backend].missing}")
    device = jax.devices(None if backend == "xla" else backend)[0]
    if name in HOPPER and not device.compute_capability.startswith("9."):
        pytest.skip(f"{name} is for Hopper")
    with jax.default_device(device), contextlib.ExitStack() as stack:
        if isa:
            stack.callback(set_cpu_isa, ISAS[0])
            set_cpu_isa(isa)
        if name:
            stack.callback(use_only, backend, "")
            use_only(backend, name)
        yield


def params(rows) -> list:
    return [pytest.param(k, id=str(k), marks=[pytest.mark.cuda] * (k.backend == "cuda")) for k in rows]


def by_name(rows, fixture: str = "kernel"):
    """The tests of the fixture with some of its kernels only."""
    return pytest.mark.parametrize(fixture, params(rows), indirect=True)


def assert_ran(kernel: KernelParam) -> None:
    """The kernel ran last, and no other in its place."""
    if kernel.name:
        assert _ffi.last_kernel(kernel.backend) == kernel.name
