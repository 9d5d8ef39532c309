"""Tokens one after another, of any model that model.py runs: the step, and the cache that it fills."""

import itertools
import time
from collections.abc import Iterator

import activations
import jax
import jax.numpy as jnp
import model
import numpy as np

from jaxgemv import QuantizedTensor, gemv

FIRST = 256  # tokens that a cache has room for: but on a GPU attention reads all of it for each token


def linear(x, w, **parts):
    """The parts inside the kernel where w has codes; else around it, as XLA would norm x again and again.

    What is normalised may be rounded, as it is outside of a kernel.
    """
    if isinstance(w, QuantizedTensor):
        return gemv(x, w, round_norm=True, **parts)
    return model.around(gemv)(x, w, **parts)


LINEAR = {"exact": linear, "int8": activations.in_int8(linear)}  # by the activations of a Config


def step(params, tokens, count, position, cache, key, temperature, top_p, config):
    """Reads the first `count` of tokens (T,), which start at `position`; the next token (1,), its position, the cache.

    With a whole prompt it is the prefill, with one token the decode step. temperature: None for the most likely token.
    top_p: only the most likely tokens, which together have this probability; None for all.
    """
    logits, cache = model.forward(
        params, tokens, config, LINEAR[config.activations], cache, position, last=count - 1
    )
    position = position + count
    token = sample(logits[0], jax.random.fold_in(key, position), temperature, top_p)
    return token.astype(jnp.int32)[None], position, cache


def several(step, steps):
    """`steps` of them as one, in a loop: what a step gives, and behind it all their tokens (steps, ...), to be read."""

    def loop(params, tokens, count, position, cache, key, temperature, top_p, config):
        def one(state, _):
            tokens, position, cache = state
            state = step(params, tokens, count, position, cache, key, temperature, top_p, config)
            return state, state[0]

        state = tokens, position, cache
        if steps == 1:  # which may be a prompt
            state, token = one(state, None)
            return *state, token[None]
        state, written = jax.lax.scan(one, state, length=steps)
        return *state, written

    return loop


def jitted(loop, params, prompt=False):
    """Compiles a `loop` of `several`, for the arrays of params in a list: to find them in there takes the host longer.

    It takes its buffers from the caller, and so writes what it gives where that was: where no address changes, XLA
    submits the CUDA graph of the call before as it is. A prompt's tokens do not fit.
    """
    structure = jax.tree.structure(params)

    def of_arrays(arrays, tokens, count, position, cache, key, temperature, top_p, config):
        params = jax.tree.unflatten(structure, arrays)
        return loop(params, tokens, count, position, cache, key, temperature, top_p, config)

    state = ("position", "cache") if prompt else ("tokens", "position", "cache")
    return jax.jit(of_arrays, static_argnames="config", donate_argnames=state)


def sample(logits, key, temperature, top_p):
    """A token, of logits (vocab,)."""
    if temperature is None:
        return jax.lax.platform_dependent(logits, cpu=_first_of_most, default=jnp.argmax)
    if top_p is None:
        return jax.random.categorical(key, logits / temperature)
    order = jnp.argsort(-logits)
    likely = jax.nn.softmax(logits[order] / temperature)
    likely = jnp.where(jnp.cumsum(likely) - likely < top_p, likely, 0)
    return order[jax.random.categorical(key, jnp.log(likely))]


def _first_of_most(logits):
    """argmax, for which XLA on a CPU has no vectors."""
    most = jnp.max(logits)
    last = logits.size - 1
    return jnp.min(jnp.where(logits == most, jnp.arange(logits.size), last))


class Decoder:
    """A model and what it has read, whose keys and values are in the cache.

    steps: tokens from one call. compiling: the seconds that this took so far.
    """

    def __init__(self, params, config, *, temperature=None, top_p=None, seed=0, size=None, steps=1):
        self.params, self.config, self.steps = params, config, steps
        self.arrays = jax.tree.leaves(params)
        # These are on the device from the beginning, so that a step sends nothing there.
        self.sampling = jax.random.key(seed), *jax.tree.map(jnp.float32, (temperature, top_p))
        self.one = jnp.int32(1)
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

    def generate(self, prompt: list[int], most: int, stops=frozenset()) -> Iterator[int]:
        """Reads the prompt, at most `room`; yields the tokens that follow, at most `most`, up to one of `stops`.

        A call is under way while the tokens of the one before are read, so that the device does not wait. What it
        writes behind a stop is not in `seen`, and so the next prompt overwrites it.
        """
        most = min(most, self.room - len(prompt) + 1)
        # pairwise gives a call when it has the next.
        calls = itertools.pairwise(itertools.chain(self._calls(prompt, most), [None]))
        tokens = (token for call, _ in calls for token in np.asarray(call).ravel().tolist())
        read = prompt
        for token in itertools.islice(tokens, most):
            self.seen += read
            if token in stops:
                return
            yield token
            read = [token]

    def _calls(self, prompt: list[int], most: int) -> Iterator[jax.Array | tuple]:
        """The tokens that each call writes, without waiting for them. A prompt is padded: few lengths to compile."""
        begin, end = len(self.seen), len(self.seen) + len(prompt)
        count = 1 if len(prompt) == 1 else max(16, 1 << (len(prompt) - 1).bit_length())
        count = min(count, self.room)
        padded = np.array(prompt + [0] * (count - len(prompt)), np.int32)
        self._make_room(begin + count)
        token, position, written = self._call(padded, np.int32(len(prompt)), np.int32(begin), 1)
        yield written
        for begin in range(end, end + most - 1, self.steps):
            # A last call may go beyond the context: at its last position, which only a token there reads.
            self._make_room(min(begin + self.steps, self.config.context))
            if (1, self.steps, self.size) not in self.programs:
                yield ()  # so that the call before is read, and not kept back by the compiler
            token, position, written = self._call(token, self.one, position, self.steps)
            yield written

    def _make_room(self, end: int):
        while end > self.size:  # twice as much, which compiles anew
            self.size = min(2 * self.size, self.config.context)
            self.cache = model.grown(self.cache, self.size)

    def _call(self, tokens, count, position, steps: int):
        """What `several` gives, without the cache."""
        args = self.arrays, tokens, count, position, self.cache, *self.sampling
        kind = len(tokens), steps, self.size
        if kind not in self.programs:
            start = time.perf_counter()
            loop = jitted(several(step, steps), self.params, prompt=len(tokens) > 1)
            self.programs[kind] = loop.lower(*args, self.config).compile()
            self.compiling += time.perf_counter() - start
        token, position, self.cache, written = self.programs[kind](*args)
        written.copy_to_host_async()
        return token, position, written
