"""Makes data/transformers.npz: configs, names of weights, and logits of small models, by transformers.

    python -P tests/golden_transformers.py

Last run with torch 2.14.1 and transformers 5.23.0. The weights are those of `weight`, which test_chat_folders.py makes
again; it needs neither library.
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

TOKENS = [3, 200, 7, 7, 31, 250, 90]
VOCABULARY = 259


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 from integers alone, the same wherever it is made: norms are about 1, Gemma's about 0."""
    size = int(np.prod(shape))
    mixed = (np.arange(size, dtype=np.uint64) + zlib.crc32(name.encode())) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    uniform = ((mixed >> np.uint64(40)).astype(np.float32) / 2.0**24 - 0.5).reshape(shape)
    if len(shape) == 1:
        return uniform / 4 + ("norm" in name and "gemma" not in name)
    return uniform * np.float32(np.sqrt(12 / shape[-1]))


def models():
    import transformers as t

    small = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 0,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    linear = {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}
    gemma = {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 3, "query_pre_attn_scalar": 24}
    default = {"rope_type": "default", "rope_theta": 5e3}
    plain = t.LlamaConfig(**small, head_dim=32, rope_parameters=default, rms_norm_eps=1e-5)
    yield "llama", t.LlamaForCausalLM(plain)
    yield (
        "llama3",
        t.LlamaForCausalLM(t.LlamaConfig(**small, rope_parameters=llama3, tie_word_embeddings=True)),
    )
    yield "linear", t.LlamaForCausalLM(t.LlamaConfig(**small, rope_parameters=linear))
    yield "qwen2", t.Qwen2ForCausalLM(t.Qwen2Config(**small))
    yield "qwen3", t.Qwen3ForCausalLM(t.Qwen3Config(**small, head_dim=32))
    yield "gemma3", t.Gemma3ForCausalLM(t.Gemma3TextConfig(**small | gemma))
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    seeing = t.Gemma3Config(text_config=small | gemma, vision_config=vision, mm_tokens_per_image=4)
    yield "gemma3_seeing", t.Gemma3ForConditionalGeneration(seeing)


def main():
    import torch
    from safetensors import safe_open

    made = {}
    for name, model in models():
        model.eval()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            path = Path(folder) / "model.safetensors"
            with safe_open(path, framework="np") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
            state = {key: torch.from_numpy(weight(f"{name} {key}", shape)) for key, shape in shapes.items()}
            from safetensors.torch import save_file

            save_file(state, path, {"format": "pt"})
            model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            logits = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
            config = (Path(folder) / "config.json").read_bytes()
        made[f"{name}/config"] = np.frombuffer(json.dumps(json.loads(config)).encode(), np.uint8)
        made[f"{name}/shapes"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        made[f"{name}/logits"] = logits[[0, 3, 6]]
    np.savez_compressed(Path(__file__).parent / "data/transformers.npz", **made)


if __name__ == "__main__":
    main()
