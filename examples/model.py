"""A Llama-architecture decoder in plain JAX: RMSNorm, rotary embedding, grouped-query attention
with a key-value cache, SwiGLU.

The weights are a dict of arrays. Each matrix is (outputs, inputs) and is only ever touched by
`linear(x, w)`, so that the caller decides what a matrix is: a float array, or low-bit codes.
Layers are a list, or `stack` makes one dict of them, and `linear` is then called with `index=`.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import safetensors.flax


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 256
    d_model: int = 256
    n_layers: int = 7
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 32
    d_ff: int = 512
    tied: bool = True  # the embedding table is the output projection too
    rope_theta: float = 10_000.0
    context: int = 512


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


def rms_norm(x, weight):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return (x32 * scale * weight).astype(x.dtype)


def rope(x, positions, theta):
    """Rotates the pairs (i, i + D/2) of x (T, heads, D) by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = positions[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q, k, v, positions):
    """Causal attention of q (T, heads, D) to k and v (S, kv_heads, D); row s is position s.

    Activations times activations, so there is no weight to keep in few bits.
    """
    T, heads, D = q.shape
    S, kv_heads, _ = k.shape
    q = q.reshape(T, kv_heads, heads // kv_heads, D)
    scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    seen = jnp.arange(S) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(T, heads * D)


def attention(x, layer, cache, positions, config, linear):
    """x (T, d_model) -> (T, d_model), and the keys and values seen so far."""
    q_end, k_end = config.n_heads * config.head_dim, (config.n_heads + config.n_kv_heads) * config.head_dim
    q, k, v = jnp.split(linear(x, layer["qkv"]), [q_end, k_end], axis=-1)
    q, k, v = (a.reshape(len(x), -1, config.head_dim) for a in (q, k, v))
    q, k = (rope(a, positions, config.rope_theta) for a in (q, k))
    if cache is not None:
        at = (positions[0], 0, 0)
        k, v = (jax.lax.dynamic_update_slice(old, new, at) for old, new in zip(cache, (k, v), strict=True))
    return linear(attend(q, k, v, positions), layer["out"]), (k, v)


def feed_forward(x, layer, linear):
    gate, up = jnp.split(linear(x, layer["gate_up"]), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, layer["down"])


def embed(table, tokens):
    # A quantised table is a pytree whose leaves all start with the row, so this takes rows of both.
    rows = jax.tree.map(lambda leaf: leaf[tokens], table)
    return rows if isinstance(rows, jax.Array) else rows.dequantize(jnp.bfloat16)


def layer_of(x, layer, cache, positions, config, linear):
    """One layer: x (T, d_model) -> (T, d_model), and the keys and values seen so far."""
    y, seen = attention(rms_norm(x, layer["attention_norm"]), layer, cache, positions, config, linear)
    x = x + y
    return x + feed_forward(rms_norm(x, layer["ffn_norm"]), layer, linear), seen


def forward(params, tokens, config, linear, cache=None, start=0):
    """tokens (T,) at positions start ... start + T - 1 -> float32 logits (T, vocab), new cache."""
    positions = start + jnp.arange(len(tokens))
    x = embed(params["embedding"], tokens)
    layers = params["layers"]
    if isinstance(layers, dict):
        x, caches = scan_layers(x, layers, cache, positions, config, linear)
    else:
        caches = []
        for layer, past in zip(layers, cache or [None] * len(layers), strict=True):
            x, seen = layer_of(x, layer, past, positions, config, linear)
            caches.append(seen)
    head = params["embedding"] if config.tied else params["head"]
    return linear(rms_norm(x, params["norm"]), head).astype(jnp.float32), caches


def scan_layers(x, layers, cache, positions, config, linear):
    """All layers, from `stack`, in one loop: compiled once. `index` reads a layer's matrices where they lie."""

    def body(x, each):
        i, past = each
        layer = {name: w[i] if w.ndim == 2 else w for name, w in layers.items()}  # vectors, stacked, have two
        return layer_of(x, layer, past, positions, config, functools.partial(linear, index=i))

    return jax.lax.scan(body, x, (jnp.arange(config.n_layers), cache))


def stack(layers):
    """Layers, or their caches, as one whose arrays begin with the number of the layer."""
    return jax.tree.map(lambda *each: jnp.stack(each), *layers)


def empty_cache(params, config, dtype=None):
    dtype = dtype or params["norm"].dtype
    shape = (config.context, config.n_kv_heads, config.head_dim)
    layers = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers)]
    return stack(layers) if isinstance(params["layers"], dict) else layers


def bits_per_byte(params, windows, config, linear, stride):
    """Mean bits to code the last `stride` bytes of each window (windows, context + 1)."""

    def bits(window):
        logits, _ = forward(params, window[:-1], config, linear)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), window[1:, None], axis=-1)
        return -jnp.mean(log_p[-stride:]) / jnp.log(2.0)

    return jnp.mean(jax.lax.map(bits, windows.astype(jnp.int32), batch_size=16))


def name(path):
    """The name of a weight in a safetensors file: "layers.3.qkv"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def save(file, params, config, metadata):
    weights = {name(path): weight for path, weight in jax.tree.leaves_with_path(params)}
    config = json.dumps(dataclasses.asdict(config))
    safetensors.flax.save_file(weights, file, {"config": config, **metadata})


def load(path):
    """The weights of a file written by train.py, and their Config."""
    with safetensors.safe_open(path, framework="flax") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        paths, structure = jax.tree.flatten_with_path(shapes(config))
        return jax.tree.unflatten(structure, [file.get_tensor(name(p)) for p, _ in paths]), config
