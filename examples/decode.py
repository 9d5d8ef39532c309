"""Tokens one after another, of any model that model.py runs: the step, and the cache that it fills."""

import functools
import time

import jax
import jax.numpy as jnp
import model
import numpy as np

from jaxgemv import QuantizedTensor, gemv

FIRST = 256  # tokens that a cache has room for: attention reads all of it for each token


def linear(x, w, **parts):
    """The parts inside the kernel where w has codes; else around it, as XLA would norm x again and again."""
    return (gemv if isinstance(w, QuantizedTensor) else model.around(gemv))(x, w, **parts)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def step(params, tokens, count, position, cache, key, temperature, top_p, config):
    """Reads the first `count` of tokens (T,), which start at `position`; the next token (1,), its position, the cache.

    With a whole prompt it is the prefill, with one token the decode step. temperature: None for the most likely token.
    top_p: only the most likely tokens, which together have this probability; None for all.
    """
    logits, cache = model.forward(params, tokens, config, linear, cache, position, last=count - 1)
    position = position + count
    token = sample(logits[0], jax.random.fold_in(key, position), temperature, top_p)
    return token.astype(jnp.int32)[None], position, cache


def sample(logits, key, temperature, top_p):
    """A token, of logits (vocab,)."""
    if temperature is None:
        return jnp.argmax(logits)
    if top_p is None:
        return jax.random.categorical(key, logits / temperature)
    order = jnp.argsort(-logits)
    likely = jax.nn.softmax(logits[order] / temperature)
    likely = jnp.where(jnp.cumsum(likely) - likely < top_p, likely, 0)
    return order[jax.random.categorical(key, jnp.log(likely))]


class Decoder:
    """A model and what it has read, whose keys and values are in the cache.

    compiling: the seconds that this took so far.
    """

    def __init__(self, params, config, *, temperature=None, top_p=None, seed=0, size=None):
        self.params, self.config = params, config
        self.sampling = jax.random.key(seed), temperature, top_p
        self.size = min(size or FIRST, config.context)
        self.cache = model.empty_cache(params, config, size=self.size)
        self.seen, self.programs, self.compiling = [], {}, 0.0

    @property
    def room(self) -> int:
        """Tokens that it can still read."""
        return self.config.context - len(self.seen)

    def keep(self, tokens: list[int]) -> int:
        """Forgets what it has read from where it is not `tokens`; how many it keeps. One is left to be read."""
        same = 0
        while same < min(len(tokens) - 1, len(self.seen)) and tokens[same] == self.seen[same]:
            same += 1
        self.seen = self.seen[:same]
        return same

    def next(self, tokens: list[int]) -> int:
        """Reads these, at most `room`; the token that follows. Several are padded, so that few lengths are compiled."""
        position = len(self.seen)
        count = 1 if len(tokens) == 1 else max(16, 1 << (len(tokens) - 1).bit_length())
        count = min(count, self.room)
        while position + count > self.size:  # twice as much, which compiles anew
            self.size = min(2 * self.size, self.config.context)
            self.cache = model.grown(self.cache, self.size)
        padded = np.array(tokens + [0] * (count - len(tokens)), np.int32)
        where = np.int32(len(tokens)), np.int32(position)
        args = self.params, padded, *where, self.cache, *self.sampling
        if (count, self.size) not in self.programs:
            start = time.perf_counter()
            self.programs[count, self.size] = step.lower(*args, self.config).compile()
            self.compiling += time.perf_counter() - start
        token, _, self.cache = self.programs[count, self.size](*args)
        self.seen = self.seen + tokens
        return int(token[0])
