"""`quantize_variables`: what linen models of `nn.Dense` were trained to, for the same of `QuantDense`."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgemv import QuantizedTensor
from jaxgemv._tensor import ARRAYS
from jaxgemv._tree import (
    Choice,
    Predicate,
    Record,
    check_arguments,
    check_functions,
    choice,
    converted,
    quantized,
    say_why,
)
from jaxgemv.flax import _layer

_OP = "quantize_variables"


def quantize_variables(
    variables: Mapping[str, Any],
    *,
    predicate: Predicate | None = None,
    donate: bool = False,
    report: Callable[[Record], Any] | None = None,
    **quantize_arguments: Any,
) -> dict[str, Any]:
    """The variables of a linen model, with the kernels of its `nn.Dense` layers as `QuantDense` has them.

    `params/.../kernel` becomes `quant/.../kernel`; all else stays as it is. They fit the model in which `QuantDense`,
    with the same bits, format and group_size, stands in the place of `nn.Dense` and has its name.

    - variables: `{"params": ...}` and other collections, boxed (`nn.with_partitioning`) or not.
    - predicate: as in `jaxgemv.quantize_tree`, asked of paths that end in kernel alone. By default those of two
      dimensions; a stack of `nn.scan` is (..., in, out) and needs to be named, since kernels of convolutions and of
      attention look alike.
    - donate, report, quantize_arguments: as in `jaxgemv.quantize_tree`.

    Raises ValueError for variables without params, and what `quantize` raises, with the path of the leaf. Warns if
    there are matrices and none is a kernel of two dimensions.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxgemv.flax.linen import QuantDense, quantize_variables
    >>> x = jnp.ones((2, 256))
    >>> trained = nn.Dense(64).init(jax.random.key(0), x)
    >>> variables = quantize_variables(trained, bits=4)
    >>> sorted(variables), QuantDense(64, bits=4).apply(variables, x).shape
    (['params', 'quant'], (2, 64))
    """
    if "params" not in variables:
        raise ValueError(f"{_OP}: variables must have a collection params; got {', '.join(variables)}")
    check_arguments(f"{_OP}: ", quantize_arguments)
    check_functions(_OP, predicate=predicate, report=report)
    flat: dict[tuple, Any] = flatten_dict(dict(variables["params"]))
    boxes = {"/".join(path): leaf for path, leaf in flat.items()}

    def chosen(name: str, leaf) -> Choice:
        asked = predicate if name.rpartition("/")[2] == "kernel" else None
        return choice(_OP, name, leaf, asked, _default)

    def make(name: str, leaf, arguments: Mapping[str, Any]) -> QuantizedTensor:
        check_arguments("", arguments)
        return quantized(leaf, quantize_arguments | dict(arguments) | {"in_axis": -2})

    leaves = [(name, nn.meta.unbox(leaf)) for name, leaf in boxes.items()]
    hint = say_why if predicate is None and not variables.get("quant") else None
    made = converted(_OP, leaves, chosen, make, donate=donate, report=report, hint=hint)
    params: dict[tuple, Any] = {}
    quant: dict[tuple, Any] = flatten_dict(dict(variables.get("quant", {})))
    for (path, box), new in zip(flat.items(), made):
        if not isinstance(new, QuantizedTensor):
            params[path] = box
            continue
        arrays = {name: a for name in ARRAYS if (a := getattr(new, name)) is not None}
        quant[path] = _layer.in_boxes(box, arrays, lambda names, ndim: (*names[:-2], names[-1], names[-2]))
    others = {name: collection for name, collection in variables.items() if name not in ("params", "quant")}
    return others | {"params": unflatten_dict(params), "quant": unflatten_dict(quant)}


def _default(name: str, leaf) -> Choice:
    last = name.rpartition("/")[2]
    if last != "kernel":
        return None, f"ends in {last}, not kernel"
    return ({}, "ends in kernel") if leaf.ndim == 2 else (None, f"has {leaf.ndim} dimensions")
