"""examples/chat.py: small GGUF files of every architecture, their logits against numpy's, and a conversation."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import logits, write

from jaxgemv import QuantizedTensor, gemv

pytestmark = pytest.mark.numerics
for _library in ("gguf", "jinja2", "tokenizers"):
    pytest.importorskip(_library)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits(architecture, example, on_cpu, rng, tmp_path):
    """All at once, and a prompt and then token by token."""
    weights = write(tmp_path / "m.gguf", architecture, rng)
    checkpoints, model = example("checkpoints"), example("model")
    params, config, _ = checkpoints.open_model(tmp_path / "m.gguf", jnp.float32)
    tokens = [3, 200, 7, 7, 31, 250, 90]
    expected = logits(weights, architecture, tokens)
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    y, _ = forward(params, jnp.asarray(tokens), config, gemv)
    np.testing.assert_allclose(y, expected, atol=2e-4 * np.abs(expected).max())
    cache = model.empty_cache(params, config, size=8)
    y, cache = forward(params, jnp.asarray(tokens[:4]), config, gemv, cache, 0, last=3)
    np.testing.assert_allclose(y[0], expected[3], atol=2e-4 * np.abs(expected).max())
    cache = model.grown(cache, 16)
    for i in range(4, len(tokens)):
        y, cache = forward(params, jnp.asarray(tokens[i : i + 1]), config, gemv, cache, i)
        np.testing.assert_allclose(y[0], expected[i], atol=2e-4 * np.abs(expected).max())


def test_codes_stay_codes(example, on_cpu, rng, tmp_path):
    """Of Q8_0, and what is made of them with --weights."""
    import gguf

    weights = write(tmp_path / "m.gguf", "llama", rng, gguf.GGMLQuantizationType.Q8_0)
    checkpoints, model = example("checkpoints"), example("model")
    tokens = jnp.asarray([3, 200, 7])
    expected = logits(weights, "llama", [3, 200, 7])
    params, config, _ = checkpoints.open_model(tmp_path / "m.gguf", jnp.float32)
    first = params["layers"][0]
    assert isinstance(first["qkv"], QuantizedTensor)
    assert first["qkv"].bits == 8
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    y, _ = forward(params, tokens, config, gemv)
    np.testing.assert_allclose(y, expected, atol=1e-3 * np.abs(expected).max())
    eight = {"bits": 8, "group_size": 32}
    params, config, _ = checkpoints.open_model(
        tmp_path, jnp.float32, weights=eight
    )  # the folder with the file
    y, _ = forward(params, tokens, config, gemv)
    np.testing.assert_allclose(y, expected, atol=3e-2 * np.abs(expected).max())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_int8_activations(architecture, example, on_cpu, rng, tmp_path):
    """Of codes: near the exact answer, and another one; a prompt is read as its tokens are, one by one."""
    import gguf

    write(tmp_path / "m.gguf", architecture, rng, gguf.GGMLQuantizationType.Q8_0)
    checkpoints, decode, model = example("checkpoints"), example("decode"), example("model")
    params, config, _ = checkpoints.open_model(tmp_path / "m.gguf", jnp.float32)
    tokens = jnp.asarray([3, 200, 7, 7, 31])
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    exact, _ = forward(params, tokens, config, decode.LINEAR["exact"])
    y, _ = forward(params, tokens, config, decode.LINEAR["int8"])
    distance = np.abs(y - exact).max() / np.abs(exact).max()
    assert 1e-4 < distance < 0.1
    cache = model.empty_cache(params, config, size=8)
    for i in range(len(tokens)):
        one, cache = forward(params, tokens[i : i + 1], config, decode.LINEAR["int8"], cache, i)
        assert np.abs(one[0] - y[i]).max() < distance * np.abs(exact).max()


@pytest.mark.parametrize(("steps", "activations"), [("1", "exact"), ("3", "exact"), ("1", "int8")])
def test_conversation(steps, activations, example, on_cpu, rng, tmp_path, monkeypatch, capsys):
    """Two turns, in a cache that grows; what the model has read is the conversation."""
    write(tmp_path / "m.gguf", "llama", rng)
    chat = example("chat")
    monkeypatch.setattr(chat.decode, "FIRST", 16)
    lines, talks, make = iter(["hello", "and you?", ""]), [], chat.Conversation
    monkeypatch.setattr(chat.console, "input", lambda *_: next(lines))
    monkeypatch.setattr(chat, "Conversation", lambda *of: talks.append(make(*of)) or talks[0])
    options = ["--model", str(tmp_path / "m.gguf"), "--tokens", "4", "--steps-per-call", steps]
    options += ["--activations", activations]
    monkeypatch.setattr(sys, "argv", ["chat.py", *options])
    chat.main()
    (talk,) = talks
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    whole = talk.tokenizer.chat(talk.messages[:-1])
    assert talk.decoder.seen[: len(whole)] == whole
    assert 16 < len(talk.decoder.seen) <= talk.decoder.size
    out = capsys.readouterr().out
    assert all(m["content"] in out for m in talk.messages if m["role"] == "assistant")


def test_sampling_keeps_to_the_likely(example, on_cpu, rng, tmp_path):
    write(tmp_path / "m.gguf", "llama", rng)
    decode, checkpoints, model = example("decode"), example("checkpoints"), example("model")
    params, config, _ = checkpoints.open_model(tmp_path / "m.gguf", jnp.float32)
    tokens = jnp.asarray([3, 200, 7])
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    y, _ = forward(params, tokens, config, gemv, last=2)
    order = np.argsort(-np.asarray(y[0]))
    p = np.exp(np.sort(np.asarray(y[0]))[::-1] / 0.7)
    allowed = set(order[: int((np.cumsum(p / p.sum()) < 0.2).sum()) + 1].tolist())
    for seed in range(5):
        cache = model.empty_cache(params, config, size=16)
        key = jax.random.key(seed)
        token, *_ = decode.step(params, tokens, jnp.int32(3), jnp.int32(0), cache, key, 0.7, 0.2, config)
        assert int(token[0]) in allowed


def test_tokens(example, rng, tmp_path):
    """Merges, special tokens, bytes of no character; text as it comes."""
    write(tmp_path / "m.gguf", "llama", rng)
    tokens, formats = example("tokens"), pytest.importorskip("jaxgemv.formats")
    tokenizer = tokens.of_gguf(formats.open(tmp_path / "m.gguf").metadata)
    ids = tokenizer.tokenizer.encode("<|im_start|>hehé\U0001f389<|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-1], ids[1:3]) == (257, 258, [256, 71])
    assert "".join(tokenizer.text(ids[1:-1])) == "hehé\U0001f389"
    assert len(list(tokenizer.text(ids[1:-1]))) == 4  # two letters, and one part a character
    assert tokenizer.stops == {258}
    chat = tokenizer.chat([{"role": "user", "content": "he"}])
    assert chat[0] == 257
    assert chat.count(256) == 1


def test_sentence_piece(example):
    """Merges in the order of scores; what is in no vocabulary becomes bytes."""
    tokens = example("tokens")
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        "a",
        "b",
        "ab",
        "\u2581ab",
        "ba",
    ]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    tokenizer = tokens.of_gguf(metadata)
    ids = tokenizer.tokenizer.encode("ab ba\n", add_special_tokens=False).ids
    assert [vocabulary[i] for i in ids] == ["\u2581ab", "\u2581", "ba", "<0x0A>"]
    assert tokenizer.first == "<s>"
    assert tokenizer.chat([{"role": "user", "content": "ab"}])[0] == 1


def test_unknown(example, rng, tmp_path, monkeypatch):
    """One line says so."""
    write(tmp_path / "m.gguf", "falcon", rng)
    for name, match in (
        ("m.gguf", "chat: the model must be one of llama, qwen2, qwen3, gemma3; got falcon"),
        ("gone.gguf", r"chat: .*there is no .*gone\.gguf"),
    ):
        monkeypatch.setattr(sys, "argv", ["chat.py", "--model", str(tmp_path / name), "Hello"])
        with pytest.raises(SystemExit, match=match):
            example("chat").main()


@pytest.fixture
def default_model(example):
    try:
        return example("checkpoints").default_model()
    except OSError as error:
        pytest.skip(str(error))


def test_default_model(default_model, example, on_cpu, monkeypatch, capsys):
    """It answers, and predicts the licence as llama.cpp does, which rounds x to int8 (a thousandth apart); so do we.

    llama.cpp: ik-llama-cpp-python 0.1.5, one token at a time.
    """
    checkpoints, chat, model = example("checkpoints"), example("chat"), example("model")
    question = "What is the capital of France?"
    monkeypatch.setattr(sys, "argv", ["chat.py", "--context", "256", question])
    chat.main()
    assert capsys.readouterr().out.endswith("The capital of France is Paris.\n")

    params, config, tokenizer = checkpoints.open_model(default_model, jnp.float32)
    text = (Path(__file__).parent.parent / "LICENSE").read_text()[:3000]
    ids = tokenizer.ids(text)[:512]
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    for linear in example("decode").LINEAR.values():
        y, _ = forward(params, jnp.asarray(ids), config, linear)
        log_p = np.asarray(jax.nn.log_softmax(y[:-1]))[np.arange(511), ids[1:]]
        np.testing.assert_allclose(-log_p.mean(), 2.76624, rtol=0.005)


def as_mlx_folder(file: Path, folder: Path, example):
    """The same weights as MLX and Hugging Face have them: Q4_1 is its affine form, codes and numbers as they are."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    checkpoints, formats = example("checkpoints"), pytest.importorskip("jaxgemv.formats")
    checkpoint = formats.open(file)
    get = checkpoint.config.__getitem__
    heads = {"q": get("attention.head_count"), "k": get("attention.head_count_kv")}
    names = {ours: theirs for _, ours, theirs in (*checkpoints.TOP[:2], *checkpoints.LAYER)}
    tensors = {}
    for name in checkpoint:
        block = re.match(r"blk\.(\d+)\.", name)
        prefix = "model." if block is None else f"model.layers.{block[1]}."
        prefix += names[name.removeprefix(block[0] if block else "")].removesuffix(".weight")
        w = checkpoint[name]
        if w.ndim == 1:
            tensors[f"{prefix}.weight"] = w
            continue
        offset = w.offset if w.offset is not None else -128 * w.scale.astype(np.float32)
        parts = {
            "weight": w.packed,
            "scales": w.scale.astype(np.float32),
            "biases": offset.astype(np.float32),
        }
        for suffix, a in parts.items():
            if (which := prefix[-6]) in heads and prefix.endswith("_proj"):  # neighbours become halves again
                a = a.reshape(heads[which], -1, 2, a.shape[-1]).swapaxes(1, 2).reshape(a.shape)
            tensors[f"{prefix}.{suffix}"] = np.ascontiguousarray(a)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": get("embedding_length"), "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads["q"], "num_key_value_heads": heads["k"], "rope_theta": get("rope.freq_base"),
        "intermediate_size": get("feed_forward_length"), "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
    }  # fmt: skip
    eight = {"bits": 8, "group_size": 32}
    config["quantization"] = {"bits": 4, "group_size": 32, "model.embed_tokens": eight}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = example("tokens").of_gguf(checkpoint.metadata)
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    said = {"chat_template": tokenizer.template, **tokenizer.special}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def test_default_model_as_a_folder(default_model, example, on_cpu, tmp_path, monkeypatch, capsys):
    """A real model in Hugging Face's layout says the same, word by word."""
    as_mlx_folder(default_model, tmp_path, example)
    chat, answers = example("chat"), []
    question = "Name three colours of the rainbow."
    for path in (default_model, tmp_path):
        options = ["--model", str(path), "--context", "256", "--tokens", "24", question]
        monkeypatch.setattr(sys, "argv", ["chat.py", *options])
        chat.main()
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert len(answers[0].split()) > 8
