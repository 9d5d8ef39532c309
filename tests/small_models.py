"""GGUF files of small models with random weights, in every architecture that the examples know, and their logits."""

from pathlib import Path

import numpy as np

WIDTH, HEADS, KV, DIM, FF = 64, 4, 2, 32, 96
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def layers_of(architecture: str) -> int:
    """So that Gemma has one that sees everything."""
    return 7 if architecture == "gemma3" else 2


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


def logits(w: dict[str, np.ndarray], architecture: str, tokens: list[int], eps=1e-6) -> np.ndarray:
    """Of all tokens, by the textbook, in float64."""
    gemma, count = architecture == "gemma3", len(tokens)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

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
