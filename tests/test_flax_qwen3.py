"""A language model of flax.nnx, quantised by us and by Qwix, against itself with the same weights as floats."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    # Flax 0.12.0, the newest for jax 0.8.0, warns as it loads.
    warnings.filterwarnings("ignore", "jax.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx
    from qwen3 import Config, Qwen3, empty_cache

    from jaxgemv.flax.nnx import QuantEinsum, QuantEmbed, QuantLinear, quantize_model

CONFIG = Config()
PRODUCTS = 7 * CONFIG.layers + 1  # of an answer with weights


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: Qwen3(CONFIG, nnx.Rngs(0)))()


def quantised_by_us(model, **rounding):
    new = quantize_model(model, **rounding)
    layers = [m for _, m in nnx.iter_graph(new) if isinstance(m, QuantLinear | QuantEinsum | QuantEmbed)]
    assert len(layers) == PRODUCTS + 1
    return new


def quantised_by_qwix(model, **rule):
    qwix = pytest.importorskip("qwix")
    if not hasattr(nnx.Variable, "get_raw_value"):
        pytest.skip("Qwix needs a newer Flax")
    import jaxgemv.qwix

    provider = jaxgemv.qwix.provider([qwix.QuantizationRule(**rule)], method="minmax")
    return qwix.quantize_model(model, provider, *arguments(jnp.zeros((1, 2), jnp.int32)))


def arguments(ids, length=8):
    return ids, empty_cache(CONFIG, ids.shape[0], length), 0


def floats(model, new):
    """The model with the weights of the new one."""
    model = nnx.clone(model)
    layers = {path: layer for path, layer in nnx.iter_graph(new) if isinstance(layer, nnx.Module)}
    for path, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Linear | nnx.Einsum):
            kernel = layers[path].kernel
            kernel = getattr(kernel, "array", kernel)  # Qwix keeps ours there
            assert kernel.shape == layer.kernel.shape
            tensor = jax.tree.map(jnp.asarray, jax.tree.leaves(kernel.tensor))
            tensor = jax.tree.unflatten(jax.tree.structure(kernel.tensor), tensor)
            layer.kernel = nnx.Param(type(kernel)(tensor, kernel.layout).dequantize())
        elif isinstance(layer, nnx.Embed) and isinstance(layers[path], QuantEmbed):
            layer.embedding = nnx.Param(layers[path].embedding.dequantize())
    return model


@nnx.jit
def step(model, ids, cache, start):
    return model(ids, cache, start)


@pytest.mark.parametrize(
    "quantised",
    [
        functools.partial(quantised_by_us, bits=4, group_size=32, method="minmax"),
        functools.partial(quantised_by_us, format="nvfp4", method="minmax"),
        functools.partial(quantised_by_qwix, weight_qtype=jnp.int4, tile_size=32),
    ],
    ids=["int4", "nvfp4", "qwix-int4"],
)
def test_logits(rng, model, quantised):
    """Of a prompt at once, and of the same in steps, the model being an argument of the jitted step."""
    new = quantised(model)
    ids = jnp.asarray(rng.integers(0, CONFIG.vocabulary, (2, 6)))
    with jax.default_matmul_precision("highest"):
        expected, _ = step(floats(model, new), *arguments(ids))
        about, _ = step(model, *arguments(ids))
    y, _ = step(new, *arguments(ids))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=1e-4 * largest)
    # Nor is that the float model, whose weights are others.
    assert np.abs(np.asarray(about) - y).max() > 1e-2 * largest

    _, cache, _ = arguments(ids)
    for start in range(6):
        one, cache = step(new, ids[:, start : start + 1], cache, start)
        np.testing.assert_allclose(one[:, 0], expected[:, start], atol=1e-4 * largest)

    jaxpr = jax.make_jaxpr(lambda ids: new(*arguments(ids)))(ids)
    assert str(jaxpr).count("gemv[") == PRODUCTS
