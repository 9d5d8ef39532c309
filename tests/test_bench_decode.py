"""Decoding with whole models: a run says where the time of a step goes, and several devices decode as one does."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("bench", reason="the sources are not beside the tests")
pytest.importorskip("bench.decode", reason="the examples are not beside the tests")

from bench import decode, decode_peers, decode_report, decode_step, decode_trace
from bench.decode_trace import Span
from jaxgemv import attention
from jaxgemv._ffi import backends

TINY = decode_step.model.Config(
    vocab=512, d_model=256, n_layers=2, n_heads=8, n_kv_heads=4, d_ff=512, context=256
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch, on_cpu):
    monkeypatch.setitem(decode_step.embedded.SIZES, "tiny", TINY)


@pytest.fixture
def run(monkeypatch, capsys):
    # Where there is a GPU it is not asked.
    monkeypatch.setattr(decode, "_read_limit", lambda device: (1e4, "a guess"))
    always = "--sizes", "tiny", "--contexts", "100", "--without", "torch"

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench.decode", *always, *options])
        decode.main()
        return capsys.readouterr().out

    return run


def test_a_run(run, tmp_path, monkeypatch):
    # Attention by XLA, so that of dense weights nothing is ours.
    monkeypatch.setattr(attention, "backends", {"cpu": backends["cpu"]._replace(missing="for this test")})
    path = tmp_path / "decode.json"
    few = "--tokens", "4", "--rounds", "2"
    output = run("--weights", "bf16,int4", "--batches", "1,3", *few, "--out", str(path))
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert [(r["batch"], r["weights"]) for r in rows] == [(1, "bf16"), (1, "int4"), (3, "bf16"), (3, "int4")]
    for r in rows:
        assert r["note"] is None
        assert r["size"] == 128
        assert r["tokens_per_s"] == pytest.approx(r["batch"] * 1e6 / r["us"])
        assert (r["ours_us"] > 0) == (r["weights"] == "int4")
        assert r["xla_us"] > 0
        assert len(r["rounds_us"]) == 2
        assert r["model"] in output
    cache = 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim * 2 * 102  # bfloat16
    weights = sum(2 * np.prod(s.shape) for s in jax.tree.leaves(decode_step.embedded.shapes(TINY)))
    assert rows[0]["nbytes"] == weights + cache
    assert rows[2]["nbytes"] == weights + 3 * cache
    assert path.with_suffix(".png").exists() == ("no plot" not in output and "plot: None" not in output)


def test_int8_activations(run, tmp_path):
    """Other products of the same weights, and rows of their own."""
    path = tmp_path / "decode.json"
    few = "--batches", "1", "--tokens", "2", "--rounds", "2", "--out", str(path)
    output = run("--weights", "int4", "--activations", "exact,int8", *few)
    rows = json.loads(path.read_text())["rows"]
    assert [r["activations"] for r in rows] == ["exact", "int8"]
    assert rows[0]["nbytes"] == rows[1]["nbytes"]
    assert all(r["note"] is None and r["ours_us"] > 0 and r["activations"] in output for r in rows)


def test_activations_of_a_file_only(run):
    with pytest.raises(SystemExit):
        run("--weights", "int4", "--activations", "bf16")


def test_an_interrupt_leaves_what_was_measured(run, monkeypatch, tmp_path):
    measure = decode_step.measure

    def interrupted(of, batch, *rest):
        if batch == 2:
            raise KeyboardInterrupt
        return measure(of, batch, *rest)

    monkeypatch.setattr(decode_step, "measure", interrupted)
    path = tmp_path / "decode.json"
    few = "--tokens", "2", "--rounds", "2"
    run("--weights", "int4", "--batches", "1,2,3", *few, "--out", str(path))
    assert [r["batch"] for r in json.loads(path.read_text())["rows"]] == [1]


def test_a_model_that_cannot_run(run, monkeypatch):
    def refuse(*args):
        raise MemoryError("not today")

    monkeypatch.setattr(decode_step, "measure", refuse)
    assert "tiny int4, exact x, jaxgemv: MemoryError: not today" in run("--weights", "int4", "--batches", "1")


def test_a_peer_that_is_not_there():
    """Or that crashes: its cells have the reason."""
    cells = [{"tokens": 2}, {"tokens": 2}]
    found = list(decode_peers.measure("llama_cpp", cells))
    if decode_peers.installed("llama_cpp"):
        pytest.skip("it is")
    assert len(found) == 2
    assert all(each["note"] for each in found)
    rows = [
        decode_report.row(
            model="m", weights="w", activations="", system="s", batch=1, context=8, size=8, **found[0]
        )
    ]
    decode_report.complete(rows[0], 1.0)
    assert decode_report.table(rows, "a device").row_count == 1


def test_split():
    """Two kernels at once count once, and each step has its part."""
    spans = [Span("a", True, 0, 2000), Span("b", False, 1000, 3000), Span("b", False, 5000, 6000)]
    assert decode_trace.split([spans], 2, 4.0) == (1.0, 1.0, 2.0, {"b": [1.0, 1.5], "a": [0.5, 1.0]})
    assert decode_trace.split([], 2, 4.0)[:3] == (None, None, None)


def test_kernels_of_a_gpu():
    """By streams, each kernel once, whatever else a profile has."""
    name = "void jaxgemv::cuda::(anonymous namespace)::kernel<int, 4>(Arguments)"
    events = [SimpleNamespace(name=n, start_ns=1.0, duration_ns=2.0) for n in (name, "fusion_3")]
    lines = [SimpleNamespace(name=n, events=events) for n in ("Stream #13(Compute)", "XLA Ops")]
    found = decode_trace._of_gpu(SimpleNamespace(lines=lines))
    assert found == [Span("jaxgemv::cuda::kernel", True, 1.0, 3.0), Span("fusion_3", False, 1.0, 3.0)]


def _tokens(of, batch, steps, mesh):
    """What it writes in eight steps, from empty caches."""
    cache = jax.tree.map(jnp.zeros_like, decode_step._random_cache(of, batch, 16, mesh))
    state = (
        jnp.arange(batch, dtype=jnp.int32).reshape((1,) if batch == 1 else (batch, 1)),
        jnp.int32(0),
        cache,
    )
    program, written = decode_step.program(of.params, batch, steps, mesh), []
    arrays = jax.tree.leaves(of.params)
    for _ in range(8 // steps):
        tokens, position, cache = state[:3]
        state = program(
            arrays, tokens, jnp.int32(1), position, cache, jax.random.key(0), None, None, of.config
        )
        written += list(np.asarray(state[-1]).reshape(-1, batch))
    return written


def test_several_sequences_and_tokens_a_call():
    """Sequences do not see each other, and a loop does what its steps do."""
    of = decode_step.random("tiny", "f32")
    one = _tokens(of, 1, 1, None)
    three = _tokens(of, 3, 1, None)
    assert [tokens[0] for tokens in three] == [tokens[0] for tokens in one]
    np.testing.assert_array_equal(_tokens(of, 3, 4, None), three)


@pytest.fixture
def two():
    devices = jax.devices("cpu")[:2]
    if len(devices) < 2:
        pytest.skip("one device")
    return devices


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_over_devices(two, batch, steps):
    of = decode_step.random("tiny", "f32")
    over, mesh = decode_step.cut(of, two)

    def joined(w, *parts):
        """Of rows in the order of devices, those of each part together."""
        each = [jnp.split(half, np.cumsum(parts[:-1])) for half in jnp.split(w, 2)]
        return jnp.concatenate([part for both in zip(*each) for part in both])

    q, kv = (n * TINY.head_dim // 2 for n in (TINY.n_heads, TINY.n_kv_heads))
    layers = [
        layer
        | {"qkv": joined(layer["qkv"], q, kv, kv)}
        | {"gate_up": joined(layer["gate_up"], TINY.d_ff // 2, TINY.d_ff // 2)}
        for layer in of.params["layers"]
    ]
    alone = of._replace(params=of.params | {"layers": layers})
    np.testing.assert_array_equal(_tokens(over, batch, steps, mesh), _tokens(alone, batch, 1, None))


def test_a_stack_over_devices(two):
    """Layers in few arrays, as a GPU has them, are cut as they are in a list."""
    of = decode_step.random("tiny", "int4")
    stacked = of._replace(params=of.params | {"layers": decode_step.stacks.stack(of.params["layers"])})
    in_list, in_stack = (
        _tokens(over, 1, 1, mesh) for over, mesh in (decode_step.cut(m, two) for m in (of, stacked))
    )
    np.testing.assert_array_equal(in_stack, in_list)
