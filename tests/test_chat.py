"""examples/chat.py: small GGUF files of every architecture, their logits against numpy's, and a conversation."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemv import QuantizedTensor, gemv

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests"),
]
for _library in ("gguf", "jinja2", "tokenizers"):
    pytest.importorskip(_library)

WIDTH, HEADS, KV, DIM, FF = 64, 4, 2, 32, 96
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def layers_of(architecture: str) -> int:
    """So that Gemma has one that sees everything."""
    return 7 if architecture == "gemma3" else 2


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the examples, as if one of them did."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for name in names & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


def byte_alphabet() -> list[str]:
    """The letters that GPT-2's tokenizer has for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write(path: Path, architecture: str, rng, kind=None) -> dict[str, np.ndarray]:
    """A file with random weights, and these as the file has them. kind: of the matrices."""
    import gguf

    vocabulary = [*byte_alphabet(), "he", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        ("block_count", layers_of(architecture)), ("context_length", 512), ("embedding_length", WIDTH),
        ("feed_forward_length", FF), ("head_count", HEADS), ("head_count_kv", KV), ("key_length", DIM),
        ("layer_norm_rms_eps", 1e-6),
        ("rope_freq_base", 5000.0), ("sliding_window", 3), ("tokenizer_model", "gpt2"), ("tokenizer_pre", "qwen2"),
        ("token_list", vocabulary), ("token_types", [1] * 257 + [3, 3]), ("token_merges", ["h e"]),
        ("eos_token_id", 258), ("bos_token_id", 257), ("add_bos_token", False), ("chat_template", TEMPLATE),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    shapes = {"token_embd": (len(vocabulary), WIDTH), "output_norm": (WIDTH,)}
    of_layer = {
        "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (HEADS * DIM, WIDTH), "attn_k": (KV * DIM, WIDTH),
        "attn_v": (KV * DIM, WIDTH), "attn_output": (WIDTH, HEADS * DIM), "ffn_gate": (FF, WIDTH),
        "ffn_up": (FF, WIDTH), "ffn_down": (WIDTH, FF),
    }  # fmt: skip
    if architecture in ("qwen3", "gemma3"):
        of_layer |= {"attn_q_norm": (DIM,), "attn_k_norm": (DIM,)}
    if architecture == "gemma3":
        of_layer |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
    else:
        shapes["output"] = (len(vocabulary), WIDTH)
    for i in range(layers_of(architecture)):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}
    weights = {}
    for name, shape in shapes.items():
        a = rng.standard_normal(shape).astype(np.float32)
        weights[f"{name}.weight"] = a / WIDTH**0.5 if a.ndim == 2 else 1 + a / 8
    if architecture == "qwen2":
        for i in range(layers_of(architecture)):
            for name in ("attn_q", "attn_k", "attn_v"):
                weights[f"blk.{i}.{name}.bias"] = rng.standard_normal(of_layer[name][0]).astype(np.float32)
    for name, a in weights.items():
        if kind is not None and a.ndim == 2:
            raw = gguf.quants.quantize(a, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            weights[name] = gguf.quants.dequantize(raw, kind)
        else:
            writer.add_tensor(name, a)
    for act in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{act}_to_file")()
    writer.close()
    return weights


def logits(w: dict[str, np.ndarray], architecture: str, tokens: list[int]) -> np.ndarray:
    """Of all tokens, by the textbook, in float64."""
    gemma, count = architecture == "gemma3", len(tokens)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def turn(x, theta):
        z = np.exp(1j * np.arange(count)[:, None, None] * theta ** (-np.arange(0, DIM, 2) / DIM))
        if architecture == "llama":  # neighbours
            y = (x[..., 0::2] + 1j * x[..., 1::2]) * z
            return np.stack([y.real, y.imag], -1).reshape(x.shape)
        y = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * z
        return np.concatenate([y.real, y.imag], -1)

    x = w["token_embd.weight"][tokens].astype(np.float64) * (WIDTH**0.5 if gemma else 1)
    for i in range(layers_of(architecture)):
        at, local = f"blk.{i}.", gemma and i % 6 != 5
        h = norm(x, f"{at}attn_norm")
        q, k, v = (
            (h @ w[f"{at}attn_{c}.weight"].T + w.get(f"{at}attn_{c}.bias", 0)).reshape(count, -1, DIM)
            for c in "qkv"
        )
        if f"{at}attn_q_norm.weight" in w:
            q, k = norm(q, f"{at}attn_q_norm"), norm(k, f"{at}attn_k_norm")
        q, k = (turn(a, 10_000.0 if local else 5000.0) for a in (q, k))
        k, v = (np.repeat(a, HEADS // KV, axis=1) for a in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / DIM**0.5
        behind = np.arange(count)[:, None] - np.arange(count)
        scores[:, (behind < 0) | (local & (behind >= 3))] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v).reshape(count, -1)
        y = y @ w[f"{at}attn_output.weight"].T
        x = x + (norm(y, f"{at}post_attention_norm") if gemma else y)
        h = norm(x, f"{at}ffn_norm")
        gate, up = h @ w[f"{at}ffn_gate.weight"].T, h @ w[f"{at}ffn_up.weight"].T
        by_tanh = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        y = (by_tanh if gemma else gate / (1 + np.exp(-gate))) * up @ w[f"{at}ffn_down.weight"].T
        x = x + (norm(y, f"{at}post_ffw_norm") if gemma else y)
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T


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
    assert isinstance(params["layers"]["q"], QuantizedTensor)
    assert params["layers"]["q"].bits == 8
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    y, _ = forward(params, tokens, config, gemv)
    np.testing.assert_allclose(y, expected, atol=1e-3 * np.abs(expected).max())
    params, config, _ = checkpoints.open_model(
        tmp_path / "m.gguf", jnp.float32, weights={"bits": 8, "group_size": 32}
    )
    y, _ = forward(params, tokens, config, gemv)
    np.testing.assert_allclose(y, expected, atol=3e-2 * np.abs(expected).max())


def test_conversation(example, on_cpu, rng, tmp_path, monkeypatch, capsys):
    """Two turns, in a cache that grows; what the model has read is the conversation."""
    write(tmp_path / "m.gguf", "llama", rng)
    chat = example("chat")
    monkeypatch.setattr(chat.decode, "FIRST", 16)
    lines, talks, make = iter(["hello", "and you?", ""]), [], chat.Conversation
    monkeypatch.setattr(chat.console, "input", lambda *_: next(lines))
    monkeypatch.setattr(chat, "Conversation", lambda *of: talks.append(make(*of)) or talks[0])
    monkeypatch.setattr(sys, "argv", ["chat.py", "--model", str(tmp_path / "m.gguf"), "--tokens", "4"])
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


def test_unknown(example, rng, tmp_path):
    write(tmp_path / "m.gguf", "falcon", rng)
    with pytest.raises(ValueError, match="the model must be one of llama, qwen2, qwen3, gemma3; got falcon"):
        example("checkpoints").open_model(tmp_path / "m.gguf", jnp.float32)


def test_default_model(example, on_cpu, monkeypatch, capsys):
    """It answers, and predicts the licence as llama.cpp does, which rounds x to int8 (a thousandth apart).

    llama.cpp: ik-llama-cpp-python 0.1.5, one token at a time.
    """
    checkpoints, chat, model = example("checkpoints"), example("chat"), example("model")
    try:
        path = checkpoints.default_model()
    except OSError as error:
        pytest.skip(str(error))
    question = "What is the capital of France?"
    monkeypatch.setattr(sys, "argv", ["chat.py", "--context", "256", question])
    chat.main()
    assert capsys.readouterr().out.endswith("The capital of France is Paris.\n")

    params, config, tokenizer = checkpoints.open_model(path, jnp.float32)
    text = (EXAMPLES.parent / "LICENSE").read_text()[:3000]
    ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids[:512]
    y, _ = jax.jit(model.forward, static_argnames=("config", "linear"))(
        params, jnp.asarray(ids), config, gemv
    )
    log_p = np.asarray(jax.nn.log_softmax(y[:-1]))[np.arange(511), ids[1:]]
    np.testing.assert_allclose(-log_p.mean(), 2.76624, rtol=0.005)
