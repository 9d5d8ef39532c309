"""Models of this repository, for model.py: a byte-level one in a file, which train.py has made, and random ones.

Their layers have q, k and v in one matrix, and gate and up in another.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import model
import safetensors.flax

from jaxgemv import quantize

CHECKPOINT = pathlib.Path(__file__).with_name("stdlib-4m.safetensors")
KINDS = {  # arguments of `quantize`, where there are codes
    "bf16": None,
    "f32": None,
    "int8": {"bits": 8, "group_size": 128},
    "int4": {"bits": 4, "group_size": 128},
    **{format: {"format": format} for format in ("nf4", "mxfp4", "nvfp4", "fp8", "mxfp8")},
}

LLAMA = functools.partial(model.Config, vocab=128_256, rope_theta=500_000.0)
SIZES = {
    "0.5b": LLAMA(d_model=1024, n_layers=24, n_heads=16, n_kv_heads=4, head_dim=64, d_ff=4096),
    "1b": LLAMA(d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192),
    "8b": LLAMA(d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14_336, tied=False),
}


def shapes(config):
    """A jax.ShapeDtypeStruct for every weight, in the structure of the weights."""
    d, q = config.d_model, config.n_heads * config.head_dim
    layer = {
        "attention_norm": (d,),
        "qkv": (q + 2 * config.n_kv_heads * config.head_dim, d),
        "out": (d, q),
        "ffn_norm": (d,),
        "gate_up": (2 * config.d_ff, d),
        "down": (d, config.d_ff),
    }
    tree = {
        "embedding": (config.vocab, d),
        "layers": [dict(layer) for _ in range(config.n_layers)],
        "norm": (d,),
    }
    if not config.tied:
        tree["head"] = (config.vocab, d)
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return jax.tree.map(bf16, tree, is_leaf=lambda node: isinstance(node, tuple))


def convert(params, kind):
    """The matrices (N, K) as they are, in bf16, or as QuantizedTensors; or all in float32."""
    if kind == "bf16":
        return params
    if kind == "f32":
        return jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    return jax.tree.map(
        lambda weight: quantize(weight, **KINDS[kind]) if weight.ndim == 2 else weight, params
    )


@functools.partial(jax.jit, static_argnames=("shape", "kind"))
def random_weight(key, shape, kind):
    """Uniform weights with the variance 1 / K, from the four bytes of random words: quick to make."""
    if len(shape) == 1:
        return convert(jnp.ones(shape, jnp.bfloat16), kind)
    words = jax.random.bits(key, (shape[0], shape[1] // 4))
    noise = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(shape).astype(jnp.float32) - 127.5
    return convert((noise / (73.9 * shape[1] ** 0.5)).astype(jnp.bfloat16), kind)


def random_model(config, kind, track):
    """One matrix at a time, so that the bf16 model never exists beside the quantised one. track: a progress bar."""
    leaves, structure = jax.tree.flatten(shapes(config))
    key = jax.random.key(0)
    leaves = [random_weight(jax.random.fold_in(key, i), s.shape, kind) for i, s in enumerate(track(leaves))]
    return jax.block_until_ready(jax.tree.unflatten(structure, leaves))


def name(path):
    """The name of a weight in a safetensors file: "layers.3.qkv"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def save(file, params, config, metadata):
    weights = {name(path): weight for path, weight in jax.tree.leaves_with_path(params)}
    config = json.dumps(dataclasses.asdict(config))
    safetensors.flax.save_file(weights, file, {"config": config, **metadata})


def load(path=CHECKPOINT):
    """The weights of a file written by train.py, and their Config."""
    with safetensors.safe_open(path, framework="flax") as file:
        config = model.Config(**json.loads(file.metadata()["config"]))
        paths, structure = jax.tree.flatten_with_path(shapes(config))
        return jax.tree.unflatten(structure, [file.get_tensor(name(p)) for p, _ in paths]), config
