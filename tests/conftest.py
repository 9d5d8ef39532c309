"""Fixtures: a seeded generator, and each backend and each compiled kernel with the device it runs on."""

import contextlib
import os

import jax
import numpy as np
import pytest
from kernels import ISAS, KernelParam, kernels, set_cpu_isa

from jaxgemv._ffi import backends, use_only


def _params(rows: list[KernelParam]) -> list:
    return [pytest.param(k, id=str(k), marks=[pytest.mark.cuda] * (k.backend == "cuda")) for k in rows]


REFERENCE = [
    KernelParam("xla", "", "", bits, x) for bits, x in ((3, "float32"), (4, "bfloat16"), (8, "float16"))
]


@contextlib.contextmanager
def _on(backend: str, isa: str = "", name: str = ""):
    """Arrays made by the test live where the backend runs, also on a machine with a GPU; and no other kernel runs."""
    if backend in backends and backends[backend].missing:
        pytest.fail(f"the {backend} backend is {backends[backend].missing}")
    device = jax.devices(None if backend == "xla" else backend)[0]
    if name == "wgmma" and not device.compute_capability.startswith("9."):
        pytest.skip("wgmma is for Hopper")
    with jax.default_device(device), contextlib.ExitStack() as stack:
        if isa:
            stack.callback(set_cpu_isa, ISAS[0])
            set_cpu_isa(isa)
        if name:
            stack.callback(use_only, backend, "")
            use_only(backend, name)
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


@pytest.fixture(params=_params([*REFERENCE, *kernels(transposed=False)]))
def kernel(request):
    """The only kernel that may run."""
    with _on(request.param.backend, request.param.isa, request.param.name):
        yield request.param


@pytest.fixture(params=_params([*REFERENCE, *kernels(transposed=True)]))
def transposed_kernel(request):
    with _on(request.param.backend, request.param.isa, request.param.name):
        yield request.param


@pytest.fixture
def on_cpu():
    """For tests of the virtual CPU devices, also where there is a GPU."""
    with _on("cpu"):
        yield


@pytest.fixture(params=ISAS)
def level(request):
    """The CPU backend at each level of instructions."""
    with _on("cpu", request.param):
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20251)
