"""`quantize_model`: the layers of a model, one after another."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array

from jaxgemv import QuantizedTensor
from jaxgemv._tensor import ARRAYS
from jaxgemv._tree import ALREADY, Choice, Predicate, Record, check_functions, choice, converted, say_why
from jaxgemv.flax._kernel import Layout
from jaxgemv.flax._nnx.base import Quantized
from jaxgemv.flax._nnx.einsum import QuantEinsum, einsum_layout
from jaxgemv.flax._nnx.embed import QuantEmbed, embed_layout
from jaxgemv.flax._nnx.linear import QuantLinear, linear_layout

_OP = "quantize_model"


class _Kind(NamedTuple):
    weight: str  # the attribute
    quant: Any  # the class, which makes a layer `_of` another
    layout: Callable[[Any], Layout]  # raises for a layer that `quant` does not stand for


# By the exact type: a class derived from one of these may compute something else.
_KINDS = {
    nnx.Linear: _Kind("kernel", QuantLinear, linear_layout),
    nnx.LinearGeneral: _Kind("kernel", QuantLinear, linear_layout),
    nnx.Einsum: _Kind("kernel", QuantEinsum, einsum_layout),
    nnx.Embed: _Kind("embedding", QuantEmbed, embed_layout),
}


# Those that the installed Flax has: older releases lack some.
_WRAPPERS = tuple(getattr(nnx, name) for name in ("WeightNorm", "SpectralNorm") if hasattr(nnx, name))


class _Leaf(NamedTuple):
    owner: Any  # the module
    attribute: str
    variable: Any  # an nnx.Variable, or an array
    array: Any
    wrapper: str | None  # a module around its own that changes kernels in each call


def quantize_model(
    model: nnx.Module,
    *,
    predicate: Predicate | None = None,
    donate: bool = False,
    report: Callable[[Record], Any] | None = None,
    **quantize_arguments: Any,
) -> nnx.Module:
    """A model in which `QuantLinear`, `QuantEinsum` and `QuantEmbed` stand for layers of Flax.

    - model: any nnx module. Every `nnx.Linear`, `LinearGeneral`, `Einsum` and `Embed` in it, also in lists, tuples and
      dicts, can be quantised, those stacked by `nnx.vmap` too; a layer in several places stays one. Layers of
      classes derived from these stay as they are.
    - predicate: (path, array) to whether the leaf is quantised, or to a dict of arguments for it in place of those
      below; the path is like "layers/0/mlp/kernel". By default all that can be.
    - donate: deletes each weight once its codes are there, so that memory never holds more than the model and one leaf;
      `model` cannot be used any more. Without it `model` stays as it is; what is not quantised is shared.
    - report: called with a record for each leaf: path, what it became, why, bytes before and after.
    - quantize_arguments: of `jaxgemv.quantize`.

    One leaf at a time, with a progress bar where `rich` is installed and stderr is a terminal. Weights with a
    NamedSharding stay sharded, as in `jaxgemv.quantize_tree`. Works under `jit` and `nnx.eval_shape`, which gives the
    model into which a checkpoint is restored. Raises TypeError for another model, and what `quantize` raises, with the
    path of the leaf. Warns if there are matrices and none is in such a layer.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxgemv.flax.nnx import quantize_model
    >>> model = nnx.Sequential(nnx.Linear(256, 512, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(512, 64, rngs=nnx.Rngs(1)))
    >>> small = quantize_model(model, bits=4, group_size=64)
    >>> small(jnp.ones((2, 256))).shape, [type(layer).__name__ for layer in small.layers[::2]]
    ((2, 64), ['QuantLinear', 'QuantLinear'])
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{_OP}: model must be a flax.nnx.Module; got {type(model).__name__}")
    check_functions(_OP, predicate=predicate, report=report)
    given, model = model, nnx.clone(model)
    leaves = dict(_leaves(model, given, "", set()))
    layers: dict[int, Quantized] = {}  # by the id of the one that each stands for
    twins: dict[Any, Quantized] = {}

    def chosen(name: str, array) -> Choice:
        refusal = _refusal(leaves[name])
        return (None, refusal) if refusal else choice(_OP, name, array, predicate, _default(leaves[name]))

    def make(name: str, array, arguments: Mapping[str, Any]) -> QuantizedTensor:
        owner, _, variable, *_ = leaves[name]
        arguments = quantize_arguments | dict(arguments)
        new = _KINDS[type(owner)].quant._of(owner, **arguments)
        # Layers that share a weight share its codes.
        asked = sorted((key, str(value)) for key, value in arguments.items() if key != "importance")
        twin = twins.setdefault((id(variable), new._k, *asked, id(arguments.get("importance"))), new)
        for each in ARRAYS:
            setattr(new, each, nnx.data(getattr(twin, each)))
        layers[id(owner)] = new
        return new._tensor

    arrays = [(name, leaf.array) for name, leaf in leaves.items()]
    hint = say_why if predicate is None else None
    converted(_OP, arrays, chosen, make, donate=donate, report=report, hint=hint)
    return _replaced(model, layers, set())


def _is_node(value) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _items(node) -> list[tuple[Any, Any]]:
    """The attributes of a module, or the elements of an `nnx.List`."""
    if isinstance(node, nnx.List):
        return list(enumerate(node))
    return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]


def _leaves(
    node, given, path: str, seen: set[int], wrapper: str | None = None
) -> Iterator[tuple[str, _Leaf]]:
    """Each variable and array of each module, by its path: a module in several places comes once.

    In the order of `given`, of which `node` is a clone, whose attributes are sorted.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    wrapper = type(node).__name__ if isinstance(node, _WRAPPERS) else wrapper
    values = dict(_items(node))
    for key, its in _items(given):
        found = jax.tree_util.tree_flatten_with_path(values[key], is_leaf=_is_node)[0]
        for (inside, child), its_child in zip(found, jax.tree.leaves(its, is_leaf=_is_node)):
            name = "/".join(
                filter(None, (path, str(key), jax.tree_util.keystr(inside, simple=True, separator="/")))
            )
            if isinstance(child, nnx.Variable):
                arrays = jax.tree.leaves(child)
                yield name, _Leaf(node, str(key), child, arrays[0] if len(arrays) == 1 else arrays, wrapper)
            elif isinstance(child, nnx.Pytree):
                yield from _leaves(child, its_child, name, seen, wrapper)
            elif isinstance(child, Array | np.ndarray):
                yield name, _Leaf(node, str(key), child, child, wrapper)


def _refusal(leaf: _Leaf) -> str | None:
    """Why the leaf is no weight that a layer of ours could have, if so."""
    kind = _KINDS.get(type(leaf.owner))
    owner = type(leaf.owner).__name__
    if kind is None:
        if isinstance(leaf.owner, Quantized) and leaf.attribute in ARRAYS:
            return ALREADY
        return f"is in {owner}, not {', '.join(kind.__name__ for kind in _KINDS)}"
    if leaf.attribute != kind.weight:
        return f"is the {leaf.attribute} of {owner}"
    if leaf.wrapper is not None:
        return f"is in {leaf.wrapper}, which changes it in each call"
    try:
        sizes = kind.layout(leaf.owner).sizes
    except (ValueError, NotImplementedError) as error:
        return str(error)
    shape = tuple(leaf.array.shape)
    if shape[len(shape) - len(sizes) :] != tuple(sizes):
        return f"has shape {shape}, where stacks in front of {tuple(sizes)} can be quantised"
    return None


def _default(leaf: _Leaf) -> Callable[[str, Any], Choice]:
    return lambda name, array: ({}, f"is the {leaf.attribute} of {type(leaf.owner).__name__}")


def _replaced(node, layers: Mapping[int, Quantized], seen: set[int]):
    """The layer that stands for a node, or the node with all in it replaced."""
    if id(node) in layers:
        return layers[id(node)]
    if not isinstance(node, nnx.Pytree) or id(node) in seen:
        return node
    seen.add(id(node))
    for key, value in _items(node):
        found, structure = jax.tree.flatten(value, is_leaf=_is_node)
        new = [_replaced(child, layers, seen) for child in found]
        if all(a is b for a, b in zip(found, new)):
            continue
        value = nnx.data(structure.unflatten(new))
        if isinstance(node, nnx.List):
            node[key] = value
        else:
            setattr(node, key, value)
    return node
