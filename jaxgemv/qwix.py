"""Weights of jaxgemv for every model that Qwix can quantise."""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

try:
    import qwix
except ModuleNotFoundError as error:
    raise ImportError('jaxgemv.qwix needs Qwix: pip install "jaxgemv[qwix]"') from error

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from opt_einsum.parser import parse_einsum_input
from qwix._src.providers.ptq import WithAux
from qwix._src.utils import flax_util

from jaxgemv._formats import METHODS, resolve
from jaxgemv._tensor import ARRAYS
from jaxgemv.flax import _layer
from jaxgemv.flax._equation import Equation, einsum
from jaxgemv.flax._kernel import Kernel, Layout, dot_general
from jaxgemv.flax._nnx.base import QuantizedKernel, metadata

_OP = "jaxgemv.qwix"
_FORMATS = {"nf4": "nf4", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "mxfp8": "mxfp8", "float8_e4m3fn": "fp8"}


def provider(rules: Sequence[qwix.QuantizationRule], *, method: str = "mse") -> qwix.QuantizationProvider:
    """For `qwix.quantize_model(model, provider(rules), ...)`: its products with weights become `jaxgemv.gemv`.

    Each product goes by the first `qwix.QuantizationRule` whose `module_path` and `op_names` match:

    - weight_qtype: int2 to int8 (jnp.int4, or "int3"), "nf4", "mxfp4", "nvfp4", "mxfp8" or jnp.float8_e4m3fn.
    - tile_size: the group_size of `jaxgemv.quantize`, of which the formats with a name have their own; a float is a
      part of the last axis that is summed over. None: one scale a row.
    - weight_calibration_method: "absmax" is symmetric, "minmax" of integers has a zero.
    - act_qtype: None, or int8: x is rounded to int8 in the groups of the weight, and products are those of integers.

    method: as in `jaxgemv.quantize`. Products without a weight and convolutions stay as they are. Float parameters
    become those of the quantised model by `jaxgemv.qwix.quantize_params`. Raises NotImplementedError for what a rule
    asks beyond this, TypeError and ValueError as `jaxgemv.quantize` does.

    >>> import jax.numpy as jnp, jaxgemv.qwix, qwix
    >>> from flax import nnx
    >>> x = jnp.ones((2, 256))
    >>> rules = [qwix.QuantizationRule(weight_qtype=jnp.int4, tile_size=64)]
    >>> model = qwix.quantize_model(nnx.Linear(256, 64, rngs=nnx.Rngs(0)), jaxgemv.qwix.provider(rules), x)
    >>> model(x).shape
    (2, 64)
    """
    return _Provider(rules, method)


def quantize_params(params: Any, abstract_quantized_params: Any, **options: Any) -> Any:
    """As `qwix.quantize_params`, for models quantised with `provider`.

    - params: a nested dict of float arrays. abstract_quantized_params: the parameters of the quantised linen model,
      `jax.eval_shape(model.init, ...)["params"]`, or the quantised nnx model, which may be abstract.

    >>> import jax, jax.numpy as jnp, jaxgemv.qwix, qwix
    >>> from flax import linen as nn
    >>> x, dense = jnp.ones((2, 256)), nn.Dense(64)
    >>> rules = [qwix.QuantizationRule(weight_qtype="nf4")]
    >>> model = qwix.quantize_model(dense, jaxgemv.qwix.provider(rules))
    >>> abstract = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    >>> params = jaxgemv.qwix.quantize_params(dense.init(jax.random.key(0), x)["params"], abstract)
    >>> model.apply({"params": params}, x).shape
    (2, 64)
    """
    ours: Any = SimpleNamespace(quantize=_quantized)  # in the place of Qwix's module with that function
    return qwix.quantize_params(params, abstract_quantized_params, _qarray_module=ours, **options)


class _How(NamedTuple):
    """What makes a Kernel from an array."""

    layout: Layout
    arguments: tuple[tuple[str, Any], ...]  # of quantize
    x_bits: int | None

    @property
    def channelwise_axes(self):
        """What qwix.quantize_params would ask for first."""
        raise TypeError(f"{_OP}: call jaxgemv.qwix.quantize_params; got qwix.quantize_params")


@flax.struct.dataclass
class _Weight(WithAux):
    """A Kernel where Qwix looks for a quantised weight."""

    def astype(self, dtype):
        return self


nnx.register_data_type(_Weight)


class _Provider(qwix.PtqProvider):
    def __init__(self, rules: Sequence[qwix.QuantizationRule], method: str):
        if method not in METHODS:
            raise ValueError(f"{_OP}: method must be 'mse' or 'minmax'; got {method!r}")
        for rule in rules:
            if not isinstance(rule, qwix.QuantizationRule):
                raise TypeError(f"{_OP}: rules must be qwix.QuantizationRules; got {type(rule).__name__}")
            if rule.weight_qtype is not None:
                _arguments(rule, 0)
        super().__init__(rules)
        self._method = method

    def get_intercept_map(self):
        intercepted = super().get_intercept_map() | {"jax.numpy.astype": self.astype}
        return {name: f for name, f in intercepted.items() if name != "jax.lax.conv_general_dilated"}

    def dot_general(
        self,
        lhs,
        rhs,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
        **options,
    ):
        (_, inner), (_, batch) = dimension_numbers
        kernel = self._kernel("dot_general", rhs, lambda: (inner, batch))
        if kernel is None:
            return jax.lax.dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding=out_sharding,
                **options,
            )
        x, out_dtype = _layer.promoted(lhs, kernel.tensor, None, dtype=None, out_dtype=preferred_element_type)
        return dot_general(_OP, x, kernel, dimension_numbers, out_dtype=out_dtype, out_sharding=out_sharding)

    def einsum(self, subscripts, *operands, preferred_element_type=None, out_sharding=None, **options):
        kernel = equation = None
        if len(operands) == 2 and isinstance(subscripts, str):
            equation = _equation(subscripts, *operands)
        if equation is not None:
            layout = equation.layout(operands[1].shape)
            kernel = self._kernel("einsum", operands[1], lambda: (layout.inner, layout.batch))
        if equation is None or kernel is None:
            options |= {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
            return jnp.einsum(subscripts, *operands, **options)
        x, out_dtype = _layer.promoted(
            operands[0], kernel.tensor, None, dtype=None, out_dtype=preferred_element_type
        )
        return einsum(_OP, equation, x, kernel, out_dtype=out_dtype, out_sharding=out_sharding)

    def asarray(self, a, dtype=None, order=None, **options):
        return a if isinstance(a, WithAux) else jnp.asarray(a, dtype, order, **options)

    def astype(self, x, dtype, /, **options):
        return x if isinstance(x, WithAux) else jnp.astype(x, dtype, **options)

    def _kernel(self, op_name: str, weight, axes) -> Kernel | None:
        """The weight's Kernel; None where it is no weight, or shall stay as it is."""
        rule, _ = self._get_current_rule_and_op_id(op_name)
        if isinstance(weight, WithAux):
            if not isinstance(weight.array, Kernel):
                got = type(weight.array).__name__
                raise TypeError(f"{_OP}: parameters must be from jaxgemv.qwix.quantize_params; got a {got}")
            return weight.array
        if rule is None or rule.weight_qtype is None:
            return None
        name = flax_util.find_param(weight)
        inner, batch = (tuple(sorted(each)) for each in axes())
        if name is None or not inner or len(inner) + len(batch) == weight.ndim:
            return None
        layout = Layout(tuple(weight.shape), inner, batch)
        arguments = _arguments(rule, weight.shape[inner[-1]]) | {"method": self._method}
        if arguments.get("format") not in ("mxfp4", "nvfp4", "mxfp8"):
            # Also where `quantize_params` has the weight in another dtype.
            arguments["scale_dtype"] = weight.dtype
        how = _How(layout, tuple(arguments.items()), 8 if rule.act_qtype is not None else None)
        kernel = _quantized(weight, how)
        _put(name, kernel, how)
        return kernel


def _arguments(rule: qwix.QuantizationRule, size: int) -> dict[str, Any]:
    """Arguments of quantize, for a weight with this many numbers along the axis that has tiles."""
    qtype = rule.weight_qtype
    name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    bits = re.fullmatch(r"int([2-8])", name)
    if not bits and name not in _FORMATS:
        raise NotImplementedError(
            f"{_OP}: weight_qtype must be int2 to int8, {', '.join(_FORMATS)}; got {name}"
        )
    calibrations = ("absmax", "minmax") if bits else ("absmax",)
    for field, known in (
        ("weight_calibration_method", calibrations),
        ("act_calibration_method", (None, "absmax")),
        ("act_static_scale", (None, False)),
    ):
        if (got := getattr(rule, field)) not in known:
            expected = " or ".join(map(repr, known))
            raise NotImplementedError(f"{_OP}: {field} must be {expected} for {name}; got {got!r}")
    act = rule.act_qtype
    if act is not None and (act if isinstance(act, str) else jnp.dtype(act).name) != "int8":
        raise NotImplementedError(f"{_OP}: act_qtype must be None or int8; got {act!r}")

    arguments: dict[str, Any] = {"format": _FORMATS.get(name)}
    if bits:
        arguments |= {"bits": int(bits[1]), "symmetric": rule.weight_calibration_method == "absmax"}
    if isinstance(rule.tile_size, float):
        arguments["group_size"] = max(1, round(size * rule.tile_size))
    elif rule.tile_size is not None or bits:
        arguments["group_size"] = rule.tile_size
    if size or not isinstance(rule.tile_size, float):
        resolve(_OP, arguments["format"], arguments.get("bits"), arguments.get("group_size", "default"))
    return arguments


def _quantized(array: jax.Array, how: _How) -> Kernel:
    return Kernel(how.layout.quantize(array, **dict(how.arguments)), how.layout, how.x_bits)


def _put(name: str, kernel: Kernel, how: _How) -> None:
    """Puts it into the module that now runs, in the place of the parameter and with its metadata."""
    module = flax_util.get_current_module()
    arrays = {field: a for field in ARRAYS if (a := getattr(kernel.tensor, field)) is not None}
    is_linen = isinstance(module, nn.Module)
    if is_linen:
        if not module.is_initializing():
            raise ValueError(f"{_OP}: {name} must be quantised (jaxgemv.qwix.quantize_params); got floats")
        arrays = _layer.in_boxes(module.get_variable("params", name), arrays, how.layout.names)
    else:
        of = partial(metadata, getattr(module, name), how.layout)
        arrays = {field: QuantizedKernel(a, **of(field, a)) for field, a in arrays.items()}
    tensor = dataclasses.replace(kernel.tensor, **arrays)
    make: Any = _Weight  # whose constructor flax.struct makes
    weight = make(dataclasses.replace(kernel, tensor=tensor), how)
    if is_linen:
        module.put_variable("params", name, weight)
    else:
        setattr(module, name, weight)


def _equation(subscripts: str, x, kernel) -> Equation | None:
    """With "->" and without ellipsis; None where it is no product over axes of the kernel."""
    try:  # only the ranks count
        shapes = [np.empty((1,) * a.ndim) for a in (x, kernel)]
        operands, out, _ = parse_einsum_input((subscripts, *shapes))
        return Equation.read(_OP, f"{operands}->{out}", kernel.ndim)
    except NotImplementedError:
        return None
