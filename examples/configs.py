"""What a checkpoint says about its model, as the Config of model.py: the keys of a GGUF file, or a config.json."""

from collections.abc import Mapping
from typing import Any

import model
import numpy as np

ARCHITECTURES = "llama", "qwen2", "qwen3", "gemma3"


def of_gguf(config: Mapping[str, Any], context: int) -> model.Config:
    architecture, get = _known(config["architecture"]), config.get
    heads, width, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    gemma, rope = architecture == "gemma3", get("rope.scaling.type", "none")
    _expect("rope.scaling.type", rope, ("none", "linear"))
    # llama.cpp too knows Gemma 3 27B, the one whose scores have a scale of their own, by its layers.
    of_gemma = _of_gemma(width, get("attention.sliding_window", 0), width / heads if layers == 62 else 0.0)
    return model.Config(
        vocab=0,
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", width // heads),
        d_ff=get("feed_forward_length"),
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_scale=get("rope.scaling.factor", 1.0) if rope == "linear" else 1.0,
        eps=get("attention.layer_norm_rms_epsilon", 1e-5),
        context=min(context, get("context_length", context)),
        rope_interleaved=architecture == "llama",  # llama.cpp permutes rows of q and k
        **of_gemma if gemma else {},
    )


def of_folder(config: Mapping[str, Any], context: int) -> model.Config:
    """What config.json leaves out has the values that the architecture's class in transformers gives it."""
    get = config.get("text_config", config).get
    architecture = _known(str(get("model_type", config["model_type"])).removesuffix("_text"))
    gemma = architecture == "gemma3"
    heads, width = get("num_attention_heads", 8), get("hidden_size")
    rope, local = _ropes(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    _expect("rope_type", kind, ("default", "linear", "llama3"))
    sliding = {
        i + 1 for i, kind in enumerate(get("layer_types") or ()) if kind == "full_attention"
    }  # layers, from 1, that see all
    every = get("sliding_window_pattern", get("_sliding_window_pattern", 6))
    if get("layer_types"):
        expected = set(range(every if gemma else 1, get("num_hidden_layers") + 1, every if gemma else 1))
        _expect("layer_types", sliding, (expected,))
    _expect(
        "the activation", get("hidden_act", get("hidden_activation")), (None, "silu", "gelu_pytorch_tanh")
    )
    of_gemma = _of_gemma(width, get("sliding_window", 4096), get("query_pre_attn_scalar", 256)) | {
        "global_every": every,
        "local_theta": local.get("rope_theta", get("rope_local_base_freq", 10_000.0)),
    }
    return model.Config(
        vocab=0,
        d_model=width,
        n_layers=get("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=get("num_key_value_heads", 4 if gemma else heads),
        head_dim=get("head_dim") or (256 if gemma else width // heads),
        d_ff=get("intermediate_size"),
        rope_theta=rope.get("rope_theta", get("rope_theta", 1e6 if gemma else 1e4)),
        rope_scale=rope.get("factor", 1.0) if kind == "linear" else 1.0,
        eps=get("rms_norm_eps", 1e-6),
        context=min(context, get("max_position_embeddings", context)),
        **of_gemma if gemma else {},
    )


def rope_factors(config: Mapping[str, Any], of: model.Config) -> np.ndarray | None:
    """What Llama 3 divides its frequencies by, (head_dim / 2,): those of long waves by `factor`, of short ones by 1."""
    rope, _ = _ropes(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    half = of.head_dim // 2
    turns = rope["original_max_position_embeddings"] / (2 * np.pi * of.rope_theta ** (np.arange(half) / half))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    short = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (short + (1 - short) / rope["factor"])).astype(np.float32)


def _ropes(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Of layers that see all, and of others."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "full_attention" in rope:
        return rope["full_attention"], rope["sliding_attention"]
    return rope, {}


def _of_gemma(width: int, window: int, query_scalar: float) -> dict[str, Any]:
    return {
        "activation": "gelu",
        "embedding_scale": width**0.5,
        "global_every": 6,
        "window": window,
        "query_scalar": query_scalar,
    }


def _known(architecture: str) -> str:
    _expect("the model", architecture, ARCHITECTURES)
    return architecture


def _expect(what: str, got, expected: tuple):
    if got not in expected:
        raise ValueError(f"{what} must be one of {', '.join(map(str, expected))}; got {got}")
