"""The examples, end to end: a model writes text, int4 costs it little, adapters improve it, experts are found."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemv import gemv, quantize

pytest.importorskip("rich")
pytest.importorskip("safetensors")
EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests")


def output_of(name: str, *options: str) -> str:
    command = [sys.executable, EXAMPLES / name, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_llama():
    prompt = "def factorial(n):\n"
    output = output_of("llama.py", "--size", "none", "--tokens", "16", "--prompt", prompt)
    assert prompt in output
    rows = re.findall(r"(bf16|f32|int8|int4)\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", output)
    bits = {kind: float(value) for kind, _, _, value in rows}
    # The bars of the example: 2.2 held-out bits per byte in bf16 (chance is 8), and 0.1 for rounding.
    assert bits["bf16"] < 2.2
    assert abs(bits["f32"] - bits["bf16"]) < 0.1
    assert abs(bits["int8"] - bits["bf16"]) < 0.1
    assert abs(bits["int4"] - bits["bf16"]) < 0.1


def test_loop_over_layers(monkeypatch):
    """--scan: the same model, its layers in one array each."""
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module("model")
    config = model.Config(vocab=32, d_model=64, n_layers=3, n_heads=4, head_dim=16, d_ff=96, context=8)
    leaves, structure = jax.tree.flatten(model.shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    params = jax.tree.unflatten(structure, leaves)
    params["layers"] = jax.tree.map(
        lambda w: quantize(w, group_size=32) if w.ndim == 2 else w, params["layers"]
    )
    stacked = params | {"layers": model.stack(params["layers"])}

    tokens = jnp.arange(5)
    for start in (None, 0):
        results = []
        for each in (params, stacked):
            cache = None if start is None else model.empty_cache(each, config, jnp.float32)
            results.append(model.forward(each, tokens, config, gemv, cache, start or 0))
        (logits, caches), (looped, cache) = results
        np.testing.assert_allclose(looped, logits, rtol=1e-4, atol=1e-4)
        for a, b in zip(jax.tree.leaves(model.stack(caches)), jax.tree.leaves(cache), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


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
