"""Folders as they are downloaded, opened by the examples: transformers' logits, every family, the code of the docs."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from golden_transformers import TOKENS, VOCABULARY, weight
from small_models import TEMPLATE, byte_alphabet, logits

from jaxgemv import QuantizedTensor, gemv

pytestmark = pytest.mark.numerics
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

GOLDEN = np.load(Path(__file__).parent / "data/transformers.npz")
MODELS = list(dict.fromkeys(name.split("/")[0] for name in GOLDEN.files))
PAGE = Path(__file__).parent.parent / "docs/models.md"


def recorded(name: str, of: str):
    return json.loads(GOLDEN[f"{name}/{of}"].tobytes())


def write_tokenizer(folder: Path, **said):
    """Bytes, and two special tokens."""
    vocabulary = [*byte_alphabet(), "he", "<|im_start|>", "<|im_end|>"]
    assert len(vocabulary) == VOCABULARY
    ids = {text: i for i, text in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("h", "e")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}} | said
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def write(folder: Path, name: str, family: str = "bfloat16", **config) -> dict[str, np.ndarray]:
    """A recorded model, its linear layers as the family has them; its weights as these stand for them."""
    make, quantization = FAMILIES[family]
    tensors, weights = {}, {}
    for key, shape in recorded(name, "shapes").items():
        w = weight(f"{name} {key}", shape)
        if family != "bfloat16" and key.endswith("_proj.weight"):
            parts, w = make(w)
            tensors |= {key.removesuffix(".weight") + suffix: a for suffix, a in parts.items()}
        else:
            tensors[key] = w
        weights[key] = w
    safetensors.save_file(
        {key: np.ascontiguousarray(a) for key, a in tensors.items()}, folder / "model.safetensors"
    )
    config = recorded(name, "config") | config
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return weights


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, example, on_cpu, tmp_path):
    write(tmp_path, name)
    checkpoints, model = example("checkpoints"), example("model")
    params, config, _ = checkpoints.open_model(tmp_path, jnp.float32)
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    y, _ = forward(params, jnp.asarray(TOKENS), config, gemv)
    expected = GOLDEN[f"{name}/logits"]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(y[np.array([0, 3, 6])], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("name", ["llama3", "linear", "gemma3"])
def test_older_configs(name, example, tmp_path):
    """As transformers 4 wrote them: what is new says the same."""
    write(tmp_path, name)
    configs = example("configs")
    new = recorded(name, "config")
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types", "head_dim")}
    rope = new["rope_parameters"]
    if name == "gemma3":
        old |= {"rope_theta": rope["full_attention"]["rope_theta"], "head_dim": new["head_dim"]}
        old |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"], "sliding_window_pattern": 6}
    else:
        old |= {"rope_theta": rope["rope_theta"], "head_dim": new.get("head_dim")}
        old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    assert configs.of_folder(old, 512) == configs.of_folder(new, 512)
    of = configs.of_folder(new, 512)
    np.testing.assert_array_equal(configs.rope_factors(old, of), configs.rope_factors(new, of))


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "llama",
            {"model_type": "falcon"},
            "the model must be one of llama, qwen2, qwen3, gemma3; got falcon",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type must be one of default, .*; got yarn",
        ),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be"),
        ("llama", {"hidden_act": "relu"}, "the activation must be"),
        ("llama", {"num_hidden_layers": 1}, r"the model must have no weights but .*; got model\.layers\.1"),
        ("llama", {"num_hidden_layers": 3}, r"the model must have model\.layers\.2\..* in each of its 3"),
    ],
)
def test_what_is_not_known(name, change, match, example, tmp_path):
    write(tmp_path, name, **change)
    with pytest.raises(ValueError, match=match):
        example("checkpoints").open_model(tmp_path, jnp.float32)


def as_gguf(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names that `logits` knows."""
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
    }  # fmt: skip
    found = {}
    for key, w in weights.items():
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        found[key] = w
    return found


@pytest.fixture
def page_code():
    """The block of docs/models.md that opens a model and decodes."""
    if not PAGE.exists():
        pytest.skip("the docs are not beside the tests")
    (block,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "open_model" in b
    ]
    code = [line for line in block.splitlines() if line.strip()]
    assert len(code) <= 15
    return block


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_of_the_docs(family, page_code, example, on_cpu, tmp_path, monkeypatch):
    """A Llama of each family, greedily: what the textbook takes as the most likely tokens, in float64."""
    weights = as_gguf(write(tmp_path, "llama", family))
    monkeypatch.chdir(PAGE.parent.parent)
    names = {"folder": tmp_path}
    exec(page_code, names)
    together = example("checkpoints").TOGETHER
    for layer in names["params"]["layers"]:
        of_codes = [name for name, w in layer.items() if isinstance(w, QuantizedTensor)]
        count = sum(len(together.get(name, [name])) for name in of_codes)
        assert count == (0 if family == "bfloat16" else 7)
    ids = names["tokenizer"].ids("the capital of france is")
    for token in names["written"]:
        likely = logits(weights, "", ids, eps=1e-5)[-1]
        assert likely[token] > likely.max() - 1e-3
        ids.append(token)


def test_conversation(example, on_cpu, tmp_path, monkeypatch, capsys):
    """Sampled, until Ctrl-D; its stop token is that of generation_config.json."""
    write(tmp_path, "qwen3")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 17]}))
    chat = example("chat")
    lines, talks, make = iter(["hello", "and you?"]), [], chat.Conversation

    def ask(*_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat.console, "input", ask)
    monkeypatch.setattr(chat, "Conversation", lambda *of: talks.append(make(*of)) or talks[0])
    options = "--temperature 0.9 --top-p 0.8 --tokens 5 --seed 3".split()
    monkeypatch.setattr(sys, "argv", ["chat.py", "--model", str(tmp_path), *options])
    chat.main()
    (talk,) = talks
    assert talk.tokenizer.stops == {258, 17}
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    said = capsys.readouterr()
    assert all(m["content"] in said.out for m in talk.messages if m["role"] == "assistant")
    assert re.search(r"prompt \d+ tokens, \d+ tokens/s", said.err)


def test_weights(example, tmp_path):
    """Other codes, made of the folder's: about as wrong as their bits let expect."""
    write(tmp_path, "llama")
    checkpoints, model = example("checkpoints"), example("model")
    forward = jax.jit(model.forward, static_argnames=("config", "linear"))
    params, config, _ = checkpoints.open_model(tmp_path, jnp.float32, weights=checkpoints.WEIGHTS["mxfp4"])
    y, _ = forward(params, jnp.asarray(TOKENS), config, gemv)
    expected = GOLDEN["llama/logits"]
    error = np.linalg.norm(y[np.array([0, 3, 6])] - expected) / np.linalg.norm(expected)
    assert 0.05 < error < 0.5


def test_first_token_of_a_text(example, tmp_path):
    """As tokenizer_config.json says, or else as the tokenizer itself does."""
    tokens = example("tokens")
    for said, first in (({}, ""), ({"add_bos_token": True}, "<|im_start|>"), ({"add_bos_token": False}, "")):
        write_tokenizer(tmp_path, bos_token="<|im_start|>", **said)
        assert tokens.of_folder(tmp_path).first == first
    write_tokenizer(tmp_path, bos_token="<|im_start|>")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokens.of_folder(tmp_path).first == "<|im_start|>"
