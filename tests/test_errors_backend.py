"""An implementation that cannot run is an error, never a silent fall-back."""

from types import SimpleNamespace

import jax
import jax.export
import pytest
from test_errors import SCALE, WQ, ZERO, X, a, check, i8, tensor

import jaxgemv
from jaxgemv import EXPORT_CHECKS, _dispatch, gemv, gemv_int4
from jaxgemv._ffi import TARGET, Backend, backends


def test_cuda_not_built(monkeypatch):
    monkeypatch.setitem(backends, "cuda", Backend((), "not built"))
    text = "gemv_int4: implementation='cuda' cannot run: the cuda backend is not built"
    check(NotImplementedError, text, gemv_int4, X, WQ, ZERO, SCALE, implementation="cuda")


def test_cuda_without_a_gpu(monkeypatch):
    """There is a backend for it, but the program is lowered for the device that there is."""
    monkeypatch.setitem(backends, "cuda", backends["cpu"])
    text = "gemv_int4: implementation='cuda' cannot run: the program is lowered for cpu"
    traced = jax.jit(lambda *args: gemv_int4(*args, implementation="cuda")).trace(X, WQ, ZERO, SCALE)
    with pytest.raises(NotImplementedError, match=text):
        traced.lower(lowering_platforms=("cpu",))


def test_export_for_cuda_without_a_gpu(monkeypatch):
    """By name too: whether there is a device is for the machine that runs it."""
    monkeypatch.setitem(backends, "cuda", backends["cpu"])
    f = jax.jit(lambda *args: gemv_int4(*args, implementation="cuda"))
    export = jax.export.export(f, platforms=("cuda",), disabled_checks=EXPORT_CHECKS)
    assert f"@{TARGET}(" in export(X, WQ, ZERO, SCALE).mlir_module()


def test_gpu_without_kernels(monkeypatch):
    """A warning, once, since products take many times as long; none where no GPU is."""
    monkeypatch.setitem(backends, "cuda", Backend((), "not built"))

    def lower():
        traced = jax.jit(lambda *args: gemv_int4(*args)).trace(X, WQ, ZERO, SCALE)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    monkeypatch.setattr("jaxgemv._dispatch._has_gpu", lambda: False)
    assert TARGET not in lower()
    monkeypatch.setattr("jaxgemv._dispatch._has_gpu", lambda: True)
    _dispatch._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"jaxgemv\._cuda is not built: on this GPU .* JAXGEMV_CUDA=ON"):
        assert TARGET not in lower()
    lower()  # with warnings as errors
    _dispatch._warn.cache_clear()


@pytest.mark.parametrize(
    ("versions", "capability", "reason"),
    [
        ((12080, 13000), "9.0", "jaxgemv._cuda is built with CUDA 13.0, and the driver is for 12.8"),
        ((13000, 13000), "7.5", "a GPU has compute capability 7.5, and kernels need 8.0"),
        ((13000, 13020), "8.0", None),
        ((12000, 12090), "12.0", None),
        ((0, 13000), None, None),  # no driver: a program for GPUs elsewhere
    ],
)
def test_gpu_that_cannot_run_kernels(versions, capability, reason, monkeypatch, capsys):
    """A warning, once, and no kernel; by name an error."""
    monkeypatch.setitem(backends, "cuda", backends["cpu"]._replace(versions=lambda: versions))
    gpus = [SimpleNamespace(compute_capability=capability)] if capability else []
    monkeypatch.setattr(_dispatch, "_gpus", lambda: gpus)
    for cached in (_dispatch.unfit_gpu, _dispatch._warn):
        cached.cache_clear()

    def lower(**arguments):
        traced = jax.jit(lambda *args: gemv_int4(*args, **arguments)).trace(X, WQ, ZERO, SCALE)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    if reason is None:
        assert TARGET in lower()
    else:
        with pytest.warns(RuntimeWarning, match=f"{reason}: on this GPU .* many times slower"):
            assert TARGET not in lower()
        assert TARGET not in lower()  # with warnings as errors
        with pytest.raises(NotImplementedError, match=f"implementation='cuda' cannot run: {reason}"):
            lower(implementation="cuda")
        jaxgemv.show_config()
        assert f"cuda: not in use, since {reason}\n" in capsys.readouterr().out
    for cached in (_dispatch.unfit_gpu, _dispatch._warn):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("compiled", "runs"),
    [
        # A wheel's; of CUDA below 12.8; and what JAXGEMV_CUDA_ARCHITECTURES may say. 0: nothing runs.
        (
            "80-real,90a-real,100-real,120",
            {80: 80, 86: 80, 89: 80, 90: 90, 100: 100, 103: 100, 110: 0, 120: 120, 121: 120, 130: 120},
        ),
        ("80-real,90a-real,90-virtual", {80: 80, 90: 90, 100: 90, 120: 90}),
        ("80", {80: 80, 89: 80, 90: 80, 120: 80}),
        ("90a-real", {80: 0, 90: 90, 100: 0}),
        ("86-real", {80: 0, 86: 86, 89: 86}),
        ("native", {80: 80, 90: 90}),
    ],
)
def test_which_code_runs(compiled, runs):
    cuda = pytest.importorskip("jaxgemv._cuda")
    assert {capability: cuda.code_for(capability, compiled) for capability in runs} == runs


def test_no_code_for_a_gpu(monkeypatch):
    table = backends["cpu"]._replace(versions=lambda: (13000, 13000), code_for=lambda capability: 0)
    monkeypatch.setitem(backends, "cuda", table)
    monkeypatch.setattr(_dispatch, "_gpus", lambda: [SimpleNamespace(compute_capability="11.0")])
    _dispatch.unfit_gpu.cache_clear()
    assert _dispatch.unfit_gpu() == "jaxgemv._cuda is not compiled for a GPU of compute capability 11.0"
    _dispatch.unfit_gpu.cache_clear()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowered_for_another_platform(platform):
    """Tracing cannot know; lowering does."""
    reason = (
        "the program is lowered for cuda" if platform == "cuda" else "this platform has no compiled kernels"
    )
    traced = jax.jit(lambda *args: gemv_int4(*args, implementation="cpu")).trace(X, WQ, ZERO, SCALE)
    with pytest.raises(NotImplementedError, match=f"gemv_int4: implementation='cpu' cannot run: {reason}"):
        traced.lower(lowering_platforms=(platform,))


def test_no_transposed_kernel(monkeypatch):
    """A gradient by a named implementation is no fall-back either; without a name the reference runs."""
    forward = [kernel for kernel in backends["cpu"].kernels if not kernel.transposed]
    monkeypatch.setitem(backends, "cpu", Backend(tuple(forward)))

    def lowered(implementation):
        grad = jax.grad(lambda *args: gemv_int4(*args, implementation=implementation).sum())
        return jax.jit(grad).trace(X, WQ, ZERO, SCALE).lower(lowering_platforms=("cpu",)).as_text()

    text = "gemv_int4: implementation='cpu' cannot run: the cpu backend has no kernel for gradients with bits"
    with pytest.raises(NotImplementedError, match=text):
        lowered("cpu")
    assert TARGET not in lowered(None)


def test_combinations_without_a_kernel(monkeypatch):
    affine = [kernel for kernel in backends["cpu"].kernels if kernel.format == "affine"]
    floats = [kernel for kernel in affine if kernel.x != "int8"]
    prefix = "gemv: implementation='cpu' cannot run: the cpu backend has no"
    cpu = {"implementation": "cpu"}
    monkeypatch.setitem(backends, "cpu", Backend(tuple(affine)))
    text = f"{prefix} kernel for bits = 4 and x of dtype float32"
    check(NotImplementedError, text, gemv, X, tensor(codebook=a(16)), **cpu)
    monkeypatch.setitem(backends, "cpu", Backend(tuple(floats)))
    text = f"{prefix} kernel for bits = 4 and x of dtype int8 without scale"
    check(NotImplementedError, text, gemv, a(64, dtype=i8), tensor(scale=None), **cpu)
