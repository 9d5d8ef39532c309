"""python -m jaxgemv: kernels or why there are none, and one product beside XLA's."""

import re
import subprocess
import sys

import jax
import pytest

from jaxgemv import __main__ as command
from jaxgemv import _dispatch
from jaxgemv._ffi import Backend, backends

BACKEND = command._BACKENDS.get(jax.devices()[0].platform)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A product that takes no time."""
    monkeypatch.setattr(command, "N", 256)
    monkeypatch.setattr(command, "K", 512)
    plan = command._PLANS.get(jax.devices()[0].platform, command._OTHERS)
    monkeypatch.setattr(command, "_PLANS", {})
    monkeypatch.setattr(command, "_OTHERS", plan._replace(rotate=1 << 20))


def lines(capsys) -> list[str]:
    """What follows show_config."""
    command.main([])
    text = capsys.readouterr().out
    assert text.startswith("jaxgemv ")
    return text.partition("\n\n")[2].splitlines()


@pytest.mark.skipif(BACKEND is None or bool(backends[BACKEND].missing), reason="no kernels for this platform")
def test_kernels(capsys):
    head, ours, xla, ratio = lines(capsys)
    assert re.search(r"256 x 512 weight and a vector of \w+, on .*\(", head)
    name = re.search(r"jaxgemv, int4 in groups of 128, kernel (\w+)", ours).group(1)
    assert name in {
        kernel.name for kernel in backends[BACKEND].find(4, re.search(r"vector of (\w+)", head)[1])
    }
    times = [float(re.search(r"([\d.]+) us$", line)[1]) for line in (ours, xla)]
    assert "XLA, dense " in xla
    assert float(re.fullmatch(r"jaxgemv is ([\d.e+-]+) times as fast\.", ratio)[1]) == pytest.approx(
        times[1] / times[0], rel=0.1
    )


def test_no_kernels(capsys, monkeypatch):
    """Says so at once, and why."""
    monkeypatch.setattr(_dispatch, "_has_gpu", lambda: False)  # no warning, which has a test of its own
    for name in backends:
        monkeypatch.setitem(backends, name, Backend((), "not built"))
    jax.clear_caches()  # of programs with kernels
    _, ours, _, _, reason = lines(capsys)
    jax.clear_caches()
    assert "jaxgemv, int4 in groups of 128, plain JAX" in ours
    assert reason == f"No kernels are in use: the {BACKEND} backend is not built."


def test_platform_without_kernels():
    """Nothing is run there by name."""
    assert command._kernel("tpu", None, None) == ("plain JAX", "there are none for tpu")


@pytest.mark.parametrize("rich", [True, False])
def test_progress(rich, capsys, monkeypatch):
    """A bar needs rich and somebody who looks; without either a line, so that one knows what takes its time."""
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with command._steps("Timing", 2) as step:
        step()
        step()
    shown = capsys.readouterr().err
    assert "Timing" in shown
    assert ("100%" in shown) == rich


def test_help():
    """And nothing but a question for help is taken."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxgemv", "--help"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("usage: python -m jaxgemv")
    with pytest.raises(SystemExit):
        command.main(["4096"])
