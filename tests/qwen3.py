"""A small Qwen3 in flax.nnx, as JAX's model libraries write it: einsums with heads, a linear MLP, a cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Config(NamedTuple):
    layers: int = 2
    vocabulary: int = 96
    width: int = 64
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    head: int = 32  # not width / heads
    theta: float = 1e6


def rope(x, positions, theta):
    """Rotates halves of each head: x (B, T, N, H), positions (T,)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, c: Config, rngs):
        self.c = c
        self.q = nnx.Einsum("BTD,DNH->BTNH", (c.width, c.heads, c.head), rngs=rngs)
        self.k = nnx.Einsum("BSD,DKH->BSKH", (c.width, c.kv_heads, c.head), rngs=rngs)
        self.v = nnx.Einsum("BSD,DKH->BSKH", (c.width, c.kv_heads, c.head), rngs=rngs)
        self.o = nnx.Einsum("BTNH,NHD->BTD", (c.heads, c.head, c.width), rngs=rngs)
        self.q_norm = nnx.RMSNorm(c.head, rngs=rngs)
        self.k_norm = nnx.RMSNorm(c.head, rngs=rngs)

    def __call__(self, x, cache, start):
        c, t = self.c, x.shape[1]
        positions = start + jnp.arange(t)
        q = rope(self.q_norm(self.q(x)), positions, c.theta)
        new = rope(self.k_norm(self.k(x)), positions, c.theta), self.v(x)
        keys, values = (jax.lax.dynamic_update_slice_in_dim(a, b, start, 1) for a, b in zip(cache, new))
        q = q.reshape(*q.shape[:2], c.kv_heads, -1, c.head)
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, keys) * c.head**-0.5
        seen = jnp.arange(keys.shape[1]) <= positions[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        y = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values)
        return self.o(y.reshape(*y.shape[:2], c.heads, c.head)), (keys, values)


class Mlp(nnx.Module):
    def __init__(self, c: Config, rngs):
        self.gate = nnx.Linear(c.width, c.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(c.width, c.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(c.hidden, c.width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, c: Config, rngs):
        self.attention_norm = nnx.RMSNorm(c.width, rngs=rngs)
        self.attention = Attention(c, rngs)
        self.mlp_norm = nnx.RMSNorm(c.width, rngs=rngs)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x, cache, start):
        y, cache = self.attention(self.attention_norm(x), cache, start)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Qwen3(nnx.Module):
    def __init__(self, c: Config, rngs):
        self.c = c
        self.embed = nnx.Embed(c.vocabulary, c.width, rngs=rngs)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.width, rngs=rngs)
        self.head = nnx.Einsum("BTD,DV->BTV", (c.width, c.vocabulary), rngs=rngs)

    def __call__(self, ids, cache, start):
        """ids (B, T) from position start on: logits (B, T, V) and the cache."""
        x, new = self.embed(ids), []
        for layer, one in zip(self.layers, cache):
            x, one = layer(x, one, start)
            new.append(one)
        return self.head(self.norm(x)), new


def empty_cache(c: Config, batch: int, length: int):
    zeros = jnp.zeros((batch, length, c.kv_heads, c.head))
    return [(zeros, zeros) for _ in range(c.layers)]
