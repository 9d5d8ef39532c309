"""An implementation that cannot run is an error, never a silent fall-back."""

import jax
import jax.export
import pytest
from test_errors import SCALE, WQ, ZERO, X, a, check, i8, tensor

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
    _dispatch._warn_of_slow_gpu.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"jaxgemv\._cuda is not built: on this GPU .* JAXGEMV_CUDA=ON"):
        assert TARGET not in lower()
    lower()  # with warnings as errors
    _dispatch._warn_of_slow_gpu.cache_clear()


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
