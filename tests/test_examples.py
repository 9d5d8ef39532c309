"""The examples, end to end: a model writes text, int4 costs it little, adapters improve it, experts are found."""

import dataclasses
import importlib
import re
import sys
from functools import partial
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


@pytest.fixture
def example(monkeypatch, capsys):
    """load(name) imports an example; run(it, *options) is what it prints. On less text than it reads by itself."""
    monkeypatch.syspath_prepend(EXAMPLES)
    corpus, embedded = map(importlib.import_module, ("corpus", "embedded"))
    monkeypatch.setattr(corpus, "held_out_windows", partial(corpus.held_out_windows, per_module=1))
    load = embedded.load

    def with_short_windows():
        params, config = load()
        return params, dataclasses.replace(config, context=128)

    monkeypatch.setattr(embedded, "load", with_short_windows)

    def run(module, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *options])
        module.main()
        return capsys.readouterr().out

    return importlib.import_module, run


def test_llama(example, monkeypatch):
    load, run = example
    llama = load("llama")
    monkeypatch.setattr(llama, "STRIDE", 64)
    speed = llama.tokens_per_second
    monkeypatch.setattr(llama, "tokens_per_second", lambda *args, seconds: speed(*args, seconds=0))
    prompt = "def factorial(n):\n"
    output = run(llama, "--size", "none", "--tokens", "16", "--prompt", prompt)
    assert prompt in output
    rows = re.findall(r"(bf16|f32|int8|int4)\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", output)
    bits = {kind: float(value) for kind, _, _, value in rows}
    # The bars of the example: 2.2 held-out bits per byte in bf16 (chance is 8), and 0.1 for rounding.
    assert bits["bf16"] < 2.2
    assert abs(bits["f32"] - bits["bf16"]) < 0.1
    assert abs(bits["int8"] - bits["bf16"]) < 0.1
    assert abs(bits["int4"] - bits["bf16"]) < 0.1


def test_loop_over_layers(example):
    """--scan: the same model, its layers in one array each."""
    load, _ = example
    model, embedded, stacks = load("model"), load("embedded"), load("stacks")
    config = model.Config(vocab=32, d_model=64, n_layers=3, n_heads=4, head_dim=16, d_ff=96, context=8)
    leaves, structure = jax.tree.flatten(embedded.shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    params = jax.tree.unflatten(structure, leaves)
    params["layers"] = jax.tree.map(
        lambda w: quantize(w, group_size=32) if w.ndim == 2 else w, params["layers"]
    )
    stacked = params | {"layers": stacks.stack(params["layers"])}
    forms = (params, config), (stacked, config), (stacked, dataclasses.replace(config, scan=True))

    tokens = jnp.arange(5)
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    for start in (None, 0):
        results = []
        for each, how in forms:
            cache = None if start is None else model.empty_cache(each, how, jnp.float32)
            results.append(forward(each, tokens, how, gemv, cache, start or 0))
        (logits, caches), (again, cache), (looped, loop_cache) = results
        for other, its in ((again, stacks.stack(cache)), (looped, loop_cache)):
            np.testing.assert_allclose(other, logits, rtol=1e-4, atol=1e-4)
            for a, b in zip(jax.tree.leaves(stacks.stack(caches)), jax.tree.leaves(its), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_few_arrays(example, monkeypatch):
    """On a GPU, of layers that are alike in all but their numbers."""
    load, _ = example
    stacks = load("stacks")
    w = jnp.ones((64, 64))

    def layers(*groups):
        return [{"up": quantize(w, group_size=group), "norm": w[0]} for group in groups]

    assert isinstance(stacks.in_few_arrays(layers(32, 32)), list)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    stacked = stacks.in_few_arrays(layers(32, 32))
    assert stacked["up"].shape == (2, 64, 64)
    assert stacked["norm"].shape == (2, 64)
    assert stacks.in_few_arrays(stacked) is stacked
    assert isinstance(stacks.in_few_arrays(layers(32, 64)), list)
    assert isinstance(stacks.in_few_arrays([{"up": w, "norm": w[0]}] * 2), list)


def test_moe(example):
    load, run = example
    output = run(load("moe"), "--tokens", "5")
    (error,) = re.findall(r"dense computation: (\S+)", output)
    assert float(error) < 1e-5


def test_lora(example, monkeypatch):
    pytest.importorskip("optax")
    load, run = example
    lora = load("lora")
    windows_of = lora.windows_of
    monkeypatch.setattr(lora, "windows_of", lambda *args: [half[:24] for half in windows_of(*args)])
    output = run(lora, "--module", "json", "--steps", "6", "--batch", "4")
    changes = re.findall(r"([\d.]+) -> ([\d.]+)", output)
    assert len(changes) == 2
    for before, after in changes:
        assert float(after) < float(before)
