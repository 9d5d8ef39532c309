"""A decoder in plain JAX: RMSNorm, rotary embedding, grouped-query attention with a key-value cache,
SwiGLU. It is Llama's, and what Qwen2, Qwen3 and Gemma 3 do otherwise is in `Config`, or done where a
layer has the weights for it.

The weights are a dict of arrays. Each matrix is (outputs, inputs) and is only ever touched by
`linear(x, w)`, so that the caller decides what a matrix is: a float array, or low-bit codes.
Layers are a list, or `stack` makes one dict of them, and `linear` is then called with `index=`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


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
    eps: float = 1e-5
    activation: str = "silu"
    rope_interleaved: bool = False  # pairs (2i, 2i + 1), as GGUF files of Llama have them
    rope_scale: float = 1.0  # divides positions
    embedding_scale: float = 1.0
    # Gemma: all layers but each `global_every`-th see `window` tokens, and turn by another base.
    global_every: int = 0
    window: int = 0
    query_scalar: float = 0.0  # whose root divides scores, instead of head_dim
    local_theta: float = 10_000.0

    def is_local(self, layer):
        return self.global_every > 0 and (layer + 1) % self.global_every != 0


def rms_norm(x, weight, eps=1e-5):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight).astype(x.dtype)


def rope(x, positions, theta, interleaved=False, factors=1.0):
    """Rotates the pairs (i, i + D/2) of x (T, heads, D) by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half) / factors
    angle = positions[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x32 = x.astype(jnp.float32)
    a, b = (x32[..., 0::2], x32[..., 1::2]) if interleaved else (x32[..., :half], x32[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    turned = jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return turned.astype(x.dtype)


def attend(q, k, v, positions, window=0, scalar=0.0):
    """Causal attention of q (T, heads, D) to k and v (S, kv_heads, D), of which the last `window`; row s is position s.

    Activations times activations, so there is no weight to keep in few bits.
    """
    T, heads, D = q.shape
    S, kv_heads, _ = k.shape
    q = q.reshape(T, kv_heads, heads // kv_heads, D)
    scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32) * (scalar or D) ** -0.5
    behind = positions[:, None] - jnp.arange(S)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(T, heads * D)


def products(x, layer, together, apart, ends, linear):
    """x times matrices that may be one, and their biases if there are any."""
    if together in layer:
        return jnp.split(linear(x, layer[together]), ends, axis=-1)
    biases = (layer.get(f"{name}_bias") for name in apart)
    ys = (linear(x, layer[name]) for name in apart)
    return [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(ys, biases, strict=True)]


def attention(x, layer, cache, positions, config, linear, local=False, factors=1.0):
    """x (T, d_model) -> (T, d_model), and the keys and values seen so far."""
    q_end, k_end = config.n_heads * config.head_dim, (config.n_heads + config.n_kv_heads) * config.head_dim
    q, k, v = products(x, layer, "qkv", ("q", "k", "v"), [q_end, k_end], linear)
    q, k, v = (a.reshape(len(x), -1, config.head_dim) for a in (q, k, v))
    if "q_norm" in layer:
        q, k = rms_norm(q, layer["q_norm"], config.eps), rms_norm(k, layer["k_norm"], config.eps)
    theta, turns = (
        (config.local_theta, positions) if local else (config.rope_theta, positions / config.rope_scale)
    )
    q, k = (rope(a, turns, theta, config.rope_interleaved, factors) for a in (q, k))
    if cache is not None:
        at = (positions[0], 0, 0)
        k, v = (jax.lax.dynamic_update_slice(old, new, at) for old, new in zip(cache, (k, v), strict=True))
    y = attend(q, k, v, positions, config.window if local else 0, config.query_scalar)
    return linear(y, layer["out"]), (k, v)


def feed_forward(x, layer, config, linear):
    gate, up = products(x, layer, "gate_up", ("gate", "up"), 2, linear)
    return linear(getattr(jax.nn, config.activation)(gate) * up, layer["down"])


def embed(table, tokens, dtype):
    """Rows of an array, or of a QuantizedTensor."""
    rows = table[tokens]
    return rows if isinstance(rows, jax.Array) else rows.dequantize(dtype)


def layer_of(x, layer, cache, positions, config, linear, local=False, factors=1.0):
    """One layer: x (T, d_model) -> (T, d_model), and the keys and values seen so far."""
    norm = functools.partial(rms_norm, eps=config.eps)
    y = norm(x, layer["attention_norm"])
    y, seen = attention(y, layer, cache, positions, config, linear, local, factors)
    x = x + (norm(y, layer["attention_post_norm"]) if "attention_post_norm" in layer else y)
    y = feed_forward(norm(x, layer["ffn_norm"]), layer, config, linear)
    return x + (norm(y, layer["ffn_post_norm"]) if "ffn_post_norm" in layer else y), seen


def forward(params, tokens, config, linear, cache=None, start=0, last=None):
    """tokens (T,) at positions start ... start + T - 1 -> float32 logits (T, vocab), new cache.

    last: the one token whose logits (1, vocab) are asked for.
    """
    positions = start + jnp.arange(len(tokens))
    x = embed(params["embedding"], tokens, params["norm"].dtype)
    x = x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)
    layers, factors = params["layers"], params.get("rope_factors", 1.0)
    if isinstance(layers, dict):
        x, caches = scan_layers(x, layers, cache, positions, config, linear, factors)
    else:
        caches = []
        for i, (layer, past) in enumerate(zip(layers, cache or [None] * len(layers), strict=True)):
            x, seen = layer_of(x, layer, past, positions, config, linear, config.is_local(i), factors)
            caches.append(seen)
    x = x if last is None else x[last][None]
    head = params["embedding"] if config.tied else params["head"]
    return linear(rms_norm(x, params["norm"], config.eps), head).astype(jnp.float32), caches


def scan_layers(x, layers, cache, positions, config, linear, factors=1.0):
    """All layers, from `stack`, in one loop: compiled once. `index` reads a layer's matrices where they lie."""

    def body(x, each):
        i, past = each
        layer = {name: w[i] if w.ndim == 2 else w for name, w in layers.items()}  # vectors, stacked, have two
        of_layer = functools.partial(linear, index=i)
        return layer_of(x, layer, past, positions, config, of_layer, factors=factors)

    return jax.lax.scan(body, x, (jnp.arange(config.n_layers), cache))


def stack(layers):
    """Layers, or their caches, as one whose arrays begin with the number of the layer."""
    return jax.tree.map(lambda *each: jnp.stack(each), *layers)


def empty_cache(params, config, dtype=None, size=None):
    """size: tokens that it has room for."""
    dtype = dtype or params["norm"].dtype
    shape = (size or config.context, config.n_kv_heads, config.head_dim)
    layers = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers)]
    return stack(layers) if isinstance(params["layers"], dict) else layers


def grown(cache, size):
    """The cache with room for so many tokens."""
    return jax.tree.map(
        lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 3) + [(0, size - a.shape[-3]), (0, 0), (0, 0)]), cache
    )


def bits(params, window, config, linear, stride):
    """Mean bits to code each of the last `stride` tokens of a window (T + 1,)."""
    logits, _ = forward(params, window[:-1], config, linear)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), window[1:, None], axis=-1)
    return -jnp.mean(log_p[-stride:]) / jnp.log(2.0)


def mean_bits(params, windows, config, linear, stride):
    """Of windows (windows, T + 1), some at a time."""
    one = functools.partial(bits, params, config=config, linear=linear, stride=stride)
    return jnp.mean(jax.lax.map(one, windows.astype(jnp.int32), batch_size=16))
