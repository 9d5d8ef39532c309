"""A decoder in plain JAX: RMSNorm, rotary embedding, grouped-query attention with a key-value cache,
SwiGLU. It is Llama's, and what Qwen2, Qwen3 and Gemma 3 do otherwise is in `Config`, or done where a
layer has the weights for it.

The weights are a dict of arrays. Each matrix is (outputs, inputs) and is only ever touched by
`linear(x, w, **parts)`, which is `jaxgemv.gemv` or like it: a matrix is a float array, or low-bit
codes, and norm, bias, activation and residual are parts of the product.
Layers are a list, or a stack (stacks.py), and `linear` is then called with `index=`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import one_token
import stacks

from jaxgemv import attention as kernels


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
    activations: str = "exact"  # what products are given: decode.py
    scan: bool = False  # stacked layers and their caches in one loop, compiled once
    sequences: int = 1  # that a vmap decodes side by side

    def is_local(self, layer):
        return self.global_every > 0 and (layer + 1) % self.global_every != 0


def rms_norm(x, weight, eps=1e-5):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight).astype(x.dtype)


GATED = {"swiglu": "silu", "geglu": "gelu"}


def around(product):
    """The `linear` of a product(x, w) without parts: they are JAX's."""

    def linear(x, w, *, norm=None, eps=1e-5, bias=None, activation=None, residual=None, **rest):
        if (i := rest.get("index")) is not None:
            norm, bias = (a if a is None or a.ndim == 1 else a[i] for a in (norm, bias))
        y = product(x if norm is None else rms_norm(x, norm, eps), w, **rest)
        y = y if bias is None else y + bias.astype(y.dtype)
        if activation in GATED:
            gate, up = jnp.split(y, 2, axis=-1)
            y = getattr(jax.nn, GATED[activation])(gate) * up
        elif activation is not None:
            y = getattr(jax.nn, activation)(y)
        return y if residual is None else residual + y

    return linear


def rotation(positions, theta, head_dim, factors=1.0):
    """(cos, sin), each (T, 1, head_dim / 2), of angles that grow with the position."""
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half) / half) / factors
    angle = positions[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rope(x, turn, interleaved=False):
    """Rotates the pairs (i, i + D/2) of x (T, heads, D); or (2i, 2i + 1), which then stand as (i, i + D/2)."""
    (cos, sin), half = turn, x.shape[-1] // 2
    x32 = x.astype(jnp.float32)
    a, b = (x32[..., 0::2], x32[..., 1::2]) if interleaved else (x32[..., :half], x32[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q, k, v, positions, window=0, scalar=0.0):
    """Causal attention of q (T, heads, D) to k and v (kv_heads, S, D), which lie at positions 0 .. S - 1, or their last
    `window`.

    Activations times activations, so there is no weight to keep in few bits.
    """
    T, heads, D = q.shape
    kv_heads, S, _ = k.shape
    if T == 1:
        scale = (scalar or D) ** -0.5
        return kernels.one_token(q[0], k, v, positions[0], window=window, scale=scale).reshape(1, -1)
    # Heads that share keys are rows of one matrix.
    q = q.reshape(T, kv_heads, -1, D).transpose(1, 2, 0, 3).reshape(kv_heads, -1, D)
    scores = jnp.einsum("kqd,ksd->kqs", q, k, preferred_element_type=jnp.float32) * (scalar or D) ** -0.5
    behind = positions[:, None] - jnp.arange(S)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    scores = jnp.where(jnp.tile(seen, (heads // kv_heads, 1)), scores, -1e30)
    y = jnp.einsum("kqs,ksd->kqd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return y.reshape(kv_heads, -1, T, D).transpose(2, 0, 1, 3).reshape(T, heads * D)


def heads_of(x, layer, config, linear, **norm):
    """Queries, keys and values (T, heads + 2 kv_heads, D) of x: by one matrix, or by three."""
    if "qkv" in layer:
        y = linear(x, layer["qkv"], bias=layer.get("qkv_bias"), **norm)
    else:
        parts = (linear(x, layer[name], bias=layer.get(f"{name}_bias"), **norm) for name in "qkv")
        y = jnp.concatenate(list(parts), axis=-1)
    return y.reshape(len(x), -1, config.head_dim)


def attend_all(y, norms, cache, positions, turn, config, window=0):
    """Queries, keys and values y (T, heads + 2 kv_heads, D) -> the heads' (T, heads * D), and all keys and values.

    norms: of q and of k, or none.
    """
    heads, kv_heads = config.n_heads, config.n_kv_heads
    qk, v = y[:, : heads + kv_heads], y[:, heads + kv_heads :]
    if norms:
        each = [jnp.tile(norm, (n, 1)) for norm, n in zip(norms, (heads, kv_heads), strict=True)]
        qk = rms_norm(qk, jnp.concatenate(each), config.eps)
    qk = rope(qk, turn, config.rope_interleaved)
    q, k, v = qk[:, :heads], qk[:, heads:].swapaxes(0, 1), v.swapaxes(0, 1)
    if cache is not None:
        at = (0, positions[0], 0)
        k, v = (jax.lax.dynamic_update_slice(old, new, at) for old, new in zip(cache, (k, v), strict=True))
    return attend(q, k, v, positions, window, config.query_scalar), (k, v)


def attention(x, layer, cache, positions, turn, config, linear, window=0):
    """x (T, d_model) -> the heads' (T, heads * D), and the keys and values (kv_heads, S, D) seen so far."""
    norm = {"norm": layer["attention_norm"], "eps": config.eps}
    y = heads_of(x, layer, config, linear, **norm)
    norms = (layer["q_norm"], layer["k_norm"]) if "q_norm" in layer else ()
    of_all = functools.partial(attend_all, config=config, window=window)
    if cache is None or len(x) > 1 or not one_token.takes(cache):
        return of_all(y, norms, cache, positions, turn)
    of_one = functools.partial(one_token.attend, config=config, window=window)
    return jax.lax.platform_dependent(y, norms, cache, positions, turn, cuda=of_one, default=of_all)


def feed_forward(x, layer, config, linear):
    """x (T, d_model) -> (T, d_ff)."""
    norm = {"norm": layer["ffn_norm"], "eps": config.eps}
    if "gate_up" in layer:
        (gated,) = (name for name, of in GATED.items() if of == config.activation)
        return linear(x, layer["gate_up"], activation=gated, **norm)
    return linear(x, layer["gate"], activation=config.activation, **norm) * linear(x, layer["up"], **norm)


def embed(table, tokens, dtype):
    """Rows of an array, or of a QuantizedTensor."""
    rows = table[tokens]
    return rows if isinstance(rows, jax.Array) else rows.dequantize(dtype)


def layer_of(x, layer, cache, positions, turn, config, linear, window=0):
    """One layer: x (T, d_model) -> (T, d_model), and the keys and values seen so far."""

    def add(x, y, product, norm):
        if norm not in layer:
            return linear(y, layer[product], residual=x)
        return x + rms_norm(linear(y, layer[product]), layer[norm], config.eps)

    y, seen = attention(x, layer, cache, positions, turn, config, linear, window)
    x = add(x, y, "out", "attention_post_norm")
    return add(x, feed_forward(x, layer, config, linear), "down", "ffn_post_norm"), seen


def forward(params, tokens, config, linear, cache=None, start=0, last=None):
    """tokens (T,) at positions start ... start + T - 1 -> float32 logits (T, vocab), new cache.

    last: the one token whose logits (1, vocab) are asked for.
    """
    positions = start + jnp.arange(len(tokens))
    x = embed(params["embedding"], tokens, params["norm"].dtype)
    x = x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)
    layers, factors = params["layers"], params.get("rope_factors", 1.0)
    turn = rotation(positions / config.rope_scale, config.rope_theta, config.head_dim, factors)
    if config.scan:
        x, caches = scan_layers(x, layers, cache, positions, turn, config, linear)
    else:
        local = rotation(positions, config.local_theta, config.head_dim, factors)
        caches = []
        for i, past in enumerate(cache or [None] * config.n_layers):
            layer, of_layer = stacks.layer_at(layers, i, linear)
            here = (local, config.window) if config.is_local(i) else (turn, 0)
            x, seen = layer_of(x, layer, past, positions, here[0], config, of_layer, here[1])
            caches.append(seen)
    x = x if last is None else x[last][None]
    head = params["embedding"] if config.tied else params["head"]
    return linear(x, head, norm=params["norm"], eps=config.eps).astype(jnp.float32), caches


def scan_layers(x, layers, cache, positions, turn, config, linear):
    """All layers, of a stack, in one loop."""

    def body(x, each):
        i, past = each
        layer, of_layer = stacks.layer_at(layers, i, linear)
        return layer_of(x, layer, past, positions, turn, config, of_layer)

    return jax.lax.scan(body, x, (jnp.arange(config.n_layers), cache))


def empty_cache(params, config, dtype=None, size=None):
    """size: tokens that it has room for."""
    dtype = dtype or params["norm"].dtype
    shape = (config.n_kv_heads, size or config.context, config.head_dim)
    layers = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers)]
    return stacks.stack(layers) if config.scan else layers


def grown(cache, size):
    """The cache with room for so many tokens."""
    return jax.tree.map(
        lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, size - a.shape[-2]), (0, 0)]), cache
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
