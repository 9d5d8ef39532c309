"""Fixtures: a seeded generator, and each backend and each compiled kernel with the device it runs on."""

import contextlib
import os
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxgemv._ffi import backends, cpu_isas, set_cpu_isa


class KernelParam(NamedTuple):
    """Rows of a backend's kernel table, as far as a test can choose among them; "xla" is the reference."""

    backend: str
    level: str  # instruction set, on the CPU
    bits: int
    x: str

    def __str__(self) -> str:
        return "-".join(filter(None, (self.backend, self.level, f"int{self.bits}", self.x)))


# Instruction sets of the CPU that this processor has; its table of kernels is of the best one only.
LEVELS = cpu_isas()


def _kernel_params(transposed: bool) -> list:
    rows = [("xla", "", 3, "float32"), ("xla", "", 4, "bfloat16"), ("xla", "", 8, "float16")]
    for name, backend in backends.items():
        levels = LEVELS if name == "cpu" else [""]
        kernels = [kernel for kernel in backend.kernels if kernel.transposed == transposed]
        rows += [(name, level, kernel.bits, kernel.x) for kernel in kernels for level in levels]
    params = [KernelParam(*row) for row in dict.fromkeys(rows)]
    return [pytest.param(p, id=str(p), marks=[pytest.mark.cuda] * (p.backend == "cuda")) for p in params]


@contextlib.contextmanager
def _on(backend: str, level: str = ""):
    """Arrays made by the test live where the backend runs, also on a machine with a GPU."""
    if backend in backends and backends[backend].missing:
        pytest.fail(f"the {backend} backend is {backends[backend].missing}")
    device = jax.devices(None if backend == "xla" else backend)[0]
    with jax.default_device(device), contextlib.ExitStack() as stack:
        if level:
            stack.callback(set_cpu_isa, LEVELS[0])
            set_cpu_isa(level)
        yield


def pytest_runtest_setup(item):
    """Tests marked cuda need a GPU; a machine that promises one must not skip them."""
    if item.get_closest_marker("cuda") is None:
        return
    reason = backends["cuda"].missing
    if reason is None:
        try:
            jax.devices("cuda")
        except RuntimeError:
            reason = "no CUDA device"
    if reason:
        stop = pytest.fail if os.environ.get("JAXGEMV_REQUIRE_CUDA") == "1" else pytest.skip
        stop(f"cuda: {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda), "xla"])
def backend(request):
    """What to pass as `implementation`."""
    with _on(request.param):
        yield request.param


@pytest.fixture(params=_kernel_params(transposed=False))
def kernel(request):
    with _on(request.param.backend, request.param.level):
        yield request.param


@pytest.fixture(params=_kernel_params(transposed=True))
def transposed_kernel(request):
    with _on(request.param.backend, request.param.level):
        yield request.param


@pytest.fixture
def on_cpu():
    """For tests of the virtual CPU devices, also where there is a GPU."""
    with _on("cpu"):
        yield


@pytest.fixture(params=LEVELS)
def level(request):
    """The CPU backend at each level of instructions."""
    with _on("cpu", request.param):
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20251)
