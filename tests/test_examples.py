"""The examples, end to end: a model writes text, int4 costs it little, adapters improve it, experts are found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("safetensors")
EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests")


def output_of(name: str, *options: str) -> str:
    command = [sys.executable, EXAMPLES / name, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_llama():
    prompt = "def factorial(n):\n"
    output = output_of("llama.py", "--size", "none", "--tokens", "16", "--prompt", prompt)
    assert prompt in output
    rows = re.findall(r"(bf16|int8|int4)\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", output)
    bits = {kind: float(value) for kind, _, _, value in rows}
    # The bars of the example: 2.2 held-out bits per byte in bf16 (chance is 8), and 0.1 for rounding.
    assert bits["bf16"] < 2.2
    assert abs(bits["int8"] - bits["bf16"]) < 0.1
    assert abs(bits["int4"] - bits["bf16"]) < 0.1


def test_moe():
    output = output_of("moe.py", "--tokens", "5")
    (error,) = re.findall(r"dense computation: (\S+)", output)
    assert float(error) < 1e-5


def test_lora():
    pytest.importorskip("optax")
    output = output_of("lora.py", "--module", "json", "--steps", "6", "--batch", "2")
    changes = re.findall(r"([\d.]+) -> ([\d.]+)", output)
    assert len(changes) == 2
    for before, after in changes:
        assert float(after) < float(before)
