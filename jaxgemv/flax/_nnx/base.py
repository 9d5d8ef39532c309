"""What the layers have in common: a weight whose arrays are variables."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemv import QuantizedTensor
from jaxgemv._formats import resolve
from jaxgemv._tensor import ARRAYS
from jaxgemv.flax import _layer
from jaxgemv.flax._kernel import Layout

# What Flax has called the metadata that names a Variable's axes, newest first.
_AXIS_NAMES = ("out_sharding", "sharding_names", "sharding")
_ARGUMENTS = {"bits": None, "format": None, "group_size": "default", "symmetric": False, "method": "mse"}
_ARGUMENTS |= {"scale_dtype": None, "importance": None}


class QuantizedKernel(nnx.Variable):
    """One array of a quantised kernel. Not an `nnx.Param`, so that gradients and optimizers leave it alone.

    >>> from flax import nnx
    >>> from jaxgemv.flax.nnx import QuantLinear, QuantizedKernel
    >>> layer = QuantLinear(256, 64, rngs=nnx.Rngs(0))
    >>> sorted(nnx.state(layer, QuantizedKernel)), sorted(nnx.state(layer, nnx.Param))
    (['packed', 'scale', 'zero'], ['bias'])
    """


class Quantized(nnx.Module):
    """The arrays of a `jaxgemv.QuantizedTensor` (..., N, K) as attributes, and how they were rounded."""

    def _quantize(self, weight: nnx.Variable, layout: Layout, arguments: Mapping[str, Any]) -> None:
        op = type(self).__name__
        if unknown := arguments.keys() - _ARGUMENTS.keys():
            raise TypeError(
                f"{op}: arguments must be among {', '.join(_ARGUMENTS)}; got {', '.join(unknown)}"
            )
        arguments = _ARGUMENTS | dict(arguments)
        bits, group_size = resolve(
            "quantize", arguments["format"], arguments["bits"], arguments["group_size"]
        )
        self.bits = bits
        self.group_size = group_size
        self.format = arguments["format"]
        self.symmetric = arguments["symmetric"]
        self.method = arguments["method"]
        self.scale_dtype = arguments["scale_dtype"]
        self._k = layout.k

        array = array_of(weight)
        w = layout.quantize(array, **arguments)
        for name in ARRAYS:
            a = getattr(w, name)
            if a is not None:
                a = QuantizedKernel(a, **metadata(weight, layout, name, a))
            setattr(self, name, nnx.data(a))

    @property
    def _tensor(self) -> QuantizedTensor:
        variables = {name: getattr(self, name) for name in ARRAYS}
        arrays = {name: array_of(v) for name, v in variables.items() if v is not None}
        return _layer.weight(arrays, bits=self.bits, group_size=self.group_size, k=self._k)


def array_of(variable: nnx.Variable) -> Any:
    """What the variable reads as; of a model that is shapes, the shape, which Flax would not index."""
    raw = variable.get_raw_value() if hasattr(variable, "get_raw_value") else variable.raw_value
    return raw if isinstance(raw, jax.ShapeDtypeStruct) else variable[...]


def param(value, metadata: Mapping, shape: tuple[int, ...] | None = None) -> nnx.Variable:
    """A Param of what an initialiser gives, in this shape; or the Variable of another layer, as it is."""
    if isinstance(value, nnx.Variable):
        return value
    if shape is not None and isinstance(value, nnx.VariableMetadata):
        value.raw_value = jnp.reshape(value.raw_value, shape)
    elif shape is not None:
        value = jnp.reshape(value, shape)
    return nnx.Param(value, **metadata)


def metadata(weight: nnx.Variable, layout: Layout, array: str, a: jax.Array) -> dict[str, Any]:
    """The weight's metadata for one of the arrays: axis names as (..., N, K) has them, hooks on values left out."""
    sharding = None if isinstance(a, Tracer) else getattr(a, "sharding", None)
    # An axis that could not be cut evenly has lost its name.
    cut = [*sharding.spec] if isinstance(sharding, NamedSharding) else [True] * a.ndim
    cut += [None] * (a.ndim - len(cut))

    def reorder(names):
        if isinstance(names, NamedSharding):
            return NamedSharding(names.mesh, reorder(names.spec))
        ours = _layer.names_of_array(layout.names(names, array_of(weight).ndim), array, a.ndim)
        ours = tuple(name if by is not None else None for name, by in zip(ours, cut))
        return PartitionSpec(*ours) if isinstance(names, PartitionSpec) else ours

    kept = {name: value for name, value in weight.get_metadata().items() if not name.startswith("on_")}
    names = {name: reorder(kept[name]) for name in _AXIS_NAMES if kept.get(name)}
    # Flax would place the array by these names, and K may not be cut wherever they say.
    return kept | names | ({"eager_sharding": False} if names else {})
