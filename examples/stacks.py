"""Layers that are alike as a stack: a dict, in which each array begins with the number of the layer."""

import functools

import jax
import jax.numpy as jnp

from jaxgemv import QuantizedTensor


def stack(layers):
    """Layers, or their caches, as one whose arrays begin with the number of the layer."""
    return jax.tree.map(lambda *each: jnp.stack(each), *layers)


def in_few_arrays(layers):
    """Layers as `stack` makes them, on a GPU, where a step is short and each array that it gets takes the host a
    microsecond. Matrix by matrix, as the list gives them up; it stays if layers differ or are not of codes.
    """
    if jax.default_backend() == "cpu" or isinstance(layers, dict):
        return layers

    def kind(layer):
        return jax.tree.structure(layer), [(a.shape, a.dtype) for a in jax.tree.leaves(layer)]

    dense = any(w.ndim == 2 and not isinstance(w, QuantizedTensor) for w in layers[0].values())
    if dense or any(kind(layer) != kind(layers[0]) for layer in layers):
        return layers
    return {name: stack([layer.pop(name) for layer in layers]) for name in list(layers[0])}


def layer_at(layers, i, linear):
    """Layer i, and the `linear` for it: `index` reads the matrices of a stack where they lie."""
    if isinstance(layers, list):
        return layers[i], linear
    layer = {name: w[i] if w.ndim == 2 and not of_linear(name) else w for name, w in layers.items()}
    return layer, functools.partial(linear, index=i)


def of_linear(name):
    """Whether a vector, which stacked has two dimensions, is a part of a product: those are stacks too, and index is
    theirs. A slice of them would be, and then XLA has that call in a CUDA graph of its own, in which it waits for all
    before it.
    """
    return name in ("attention_norm", "ffn_norm") or name.endswith("_bias")
