"""An implementation that cannot run is an error, never a silent fall-back."""

import jax
import pytest
from test_errors import SCALE, WQ, ZERO, X, a, check, i8, tensor

from jaxgemv import gemv, gemv_int4
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


def test_combinations_without_a_kernel():
    prefix = "gemv: implementation='cpu' cannot run: the cpu backend has no"
    cpu = {"implementation": "cpu"}
    check(NotImplementedError, f"{prefix} kernel that takes codebook", gemv, X, tensor(codebook=a(16)), **cpu)
    text = f"{prefix} kernel for bits = 4 and x of dtype int8 without scale"
    check(NotImplementedError, text, gemv, a(64, dtype=i8), tensor(scale=None), **cpu)
