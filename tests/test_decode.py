"""examples/decode.py: tokens do not depend on how many come from one call, nor on the call that is under way."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxgemv import quantize

pytest.importorskip("safetensors")

PROMPT = [3, 17, 8, 30, 5]


@pytest.fixture
def made(example, on_cpu, monkeypatch):
    """The examples' decode.py, a model with a context of 37, and what it writes by steps that are waited for."""
    decode, model, embedded = map(example, ("decode", "model", "embedded"))
    monkeypatch.setattr(decode, "FIRST", 16)
    config = model.Config(vocab=64, d_model=64, n_layers=2, n_heads=4, head_dim=16, d_ff=96, context=37)
    leaves, structure = jax.tree.flatten(embedded.shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    params = jax.tree.unflatten(structure, leaves)

    step = jax.jit(decode.step, static_argnames="config")

    def expected(prompt, most, *sampling):
        cache = model.empty_cache(params, config, size=64)
        tokens, position, written = jnp.asarray(prompt), jnp.int32(0), []
        for _ in range(most):
            state = jnp.int32(len(tokens)), position, cache, jax.random.key(0), *(sampling or (None, None))
            tokens, position, cache = step(params, tokens, *state, config)
            written.append(int(tokens[0]))
        return written

    return decode, params, config, expected


@pytest.mark.parametrize("sampling", [(), (0.9, None), (0.9, 0.8)], ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_tokens_a_call(steps, sampling, made):
    """In a cache that grows, up to the context's last token: the last of three steps a call is beyond it."""
    decode, params, config, expected = made
    wanted = expected(PROMPT, 33, *sampling)
    assert len(set(wanted)) > 8
    options = dict(zip(("temperature", "top_p"), sampling))
    decoder = decode.Decoder(params, config, steps=steps, **options)
    assert list(decoder.generate(PROMPT, 100)) == wanted
    assert decoder.seen == PROMPT + wanted[:-1]
    assert decoder.room == 0
    # Nothing that it has read was overwritten.
    for kept in (30, 32):
        again = PROMPT + wanted[:kept]
        assert decoder.keep(again) == len(again) - 1
        assert list(decoder.generate(again[-1:], 100)) == wanted[kept:]


def test_many_sequences(made):
    """Each gets what it gets alone."""
    decode, params, config, _ = made
    codes = jax.tree.map(lambda a: quantize(a, bits=8, group_size=32) if a.ndim == 2 else a, params)
    empty = decode.model.empty_cache(params, config, size=64)

    def written(prompts):
        of, key = dataclasses.replace(config, sequences=len(prompts)), jax.random.key(0)

        def one(tokens, position, cache):
            return decode.step(codes, tokens, jnp.int32(len(tokens)), position, cache, key, None, None, of)

        step = jax.jit(jax.vmap(one, in_axes=(0, None, 0), out_axes=(0, None, 0)))
        cache = jax.tree.map(lambda a: jnp.stack([a] * len(prompts)), empty)
        tokens, position, found = jnp.array(prompts), jnp.int32(0), []
        for _ in range(4):
            tokens, position, cache = step(tokens, position, cache)
            found.append(tokens[:, 0].tolist())
        return found

    first, second = written([PROMPT]), written([PROMPT[::-1]])
    assert written([PROMPT, PROMPT[::-1], PROMPT]) == [a + b + a for a, b in zip(first, second)]
    assert first != second


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_stop(steps, made):
    """Wherever it is in a call; the next turn sees nothing of what was written behind it."""
    decode, params, config, expected = made
    wanted = expected(PROMPT, 7)
    assert len(set(wanted)) == 7
    decoder = decode.Decoder(params, config, steps=steps)
    for count, stop in enumerate(wanted):
        decoder.keep([])
        assert list(decoder.generate(PROMPT, 20, {stop})) == wanted[:count]
        assert decoder.seen == PROMPT + wanted[:count]
        turn = [*decoder.seen, 63, 2]
        assert decoder.keep(turn) == len(turn) - 2
        assert list(decoder.generate(turn[-2:], 6)) == expected(turn, 6)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_call_is_under_way(steps, made, monkeypatch):
    """When a token is given the next call has been asked for, and at the end none that nobody reads."""
    decode, params, config, _ = made
    decoder, calls = decode.Decoder(params, dataclasses.replace(config, context=64), steps=steps), []
    list(decoder.generate(PROMPT, 12))  # compiles
    call = decoder._call
    monkeypatch.setattr(decoder, "_call", lambda *args: calls.append(args) or call(*args))
    under_way = []
    decoder.keep([])
    for _ in decoder.generate(PROMPT, 1 + 3 * steps):
        under_way.append(len(calls))
    assert under_way == [2, *[3] * steps, *[4] * steps, *[4] * steps]
