"""`QuantDense`: `flax.linen.Dense` over a low-bit kernel; `quantize_variables`, which makes its variables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise ImportError('jaxgemv.flax.linen needs Flax: pip install "jaxgemv[flax]"') from error

import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array

from jaxgemv import gemv, quantize
from jaxgemv._formats import GroupSize, resolve
from jaxgemv._tensor import ARRAYS
from jaxgemv.flax import _layer
from jaxgemv.flax._variables import quantize_variables as quantize_variables

_NO_HOOKS = {"promote_dtype": promote_dtype, "dot_general": None, "dot_general_cls": None}


class QuantDense(nn.Module):
    """A linear layer over the last dimension, with the fields of `nn.Dense` and a kernel of low-bit codes.

    Variables: `params/bias`, trained as ever, and `quant/kernel`, a dict with the arrays of a
    `jaxgemv.QuantizedTensor` of shape (features, in): `packed`, `scale`, and `zero` unless symmetric, or what the
    format has instead (an imported kernel may bring others). `init` quantises what `kernel_init` gives; axis names that
    `nn.with_partitioning` or `nn.with_logical_partitioning` puts on the kernel pass to its arrays, out before in.

    - features, use_bias, dtype, param_dtype, kernel_init, bias_init: as in `nn.Dense`. The result has the
      computation's dtype, to which the kernel adds the dtype of its scale.
    - precision: None, DEFAULT or HIGHEST, all of which mean float32 sums.
    - promote_dtype, dot_general, dot_general_cls: only the defaults.
    - bits, format, group_size, symmetric, method, scale_dtype: as in `jaxgemv.quantize`; bits and group_size are
      those of the format, or the defaults, once the layer is made. implementation: as in `jaxgemv.gemv`.

    Under `nn.scan` and `nn.vmap`, give `quant` an axis in `variable_axes`, as `params` has one. Raises ValueError
    for the arguments above, and what `jaxgemv.quantize` and `jaxgemv.gemv` raise.

    >>> import jax, jax.numpy as jnp
    >>> from jaxgemv.flax.linen import QuantDense
    >>> layer, x = QuantDense(64, bits=4, group_size=32), jnp.ones((2, 256))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x).shape, variables["quant"]["kernel"]["scale"].shape
    ((2, 64), (64, 8))
    """

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.linear.default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    dot_general: Any = None
    dot_general_cls: Any = None
    bits: int = None  # pyright: ignore[reportAssignmentType]  becomes 4, or the format's
    format: str | None = None
    group_size: int | None = "default"  # pyright: ignore[reportAssignmentType]  becomes 128, or the format's
    symmetric: bool = False
    method: str = "mse"
    scale_dtype: Dtype | None = None
    implementation: str | None = None

    def __post_init__(self):
        bits, group_size = resolve("quantize", self.format, self.bits, self.group_size)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "group_size", group_size)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """inputs (..., in), of a float dtype, to (..., features)."""
        _check(self)
        k = jnp.shape(inputs)[-1]

        def init_kernel():
            kernel = self.kernel_init(self.make_rng("params"), (k, self.features), self.param_dtype)
            return _quantized(self, kernel)

        kernel = self.variable("quant", "kernel", init_kernel).value
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        w = _layer.weight(kernel, bits=self.bits, group_size=self.group_size, k=k)
        if w.shape[-2] != self.features:
            raise ValueError(
                f"QuantDense: kernel must have {self.features} features; got variables of {w.shape[-2]}"
            )
        x, out_dtype = _layer.promoted(inputs, w, bias, dtype=self.dtype)
        return gemv(x, w, bias=bias, out_dtype=out_dtype, implementation=self.implementation)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Dense,
        variables: Mapping,
        *,
        bits: int | None = None,
        format: str | None = None,
        group_size: GroupSize = "default",
        symmetric: bool = False,
        method: str = "mse",
        scale_dtype: Dtype | None = None,
        implementation: str | None = None,
    ) -> tuple["QuantDense", dict]:
        """The layer and the variables that stand for `dense` and its variables `{"params": {"kernel", "bias"}}`.

        A kernel with leading dimensions, (..., in, out), as `nn.scan` and `nn.vmap` stack it, becomes a stack. Raises
        TypeError for another layer, also one derived from `nn.Dense` that computes something else.

        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> from jaxgemv.flax.linen import QuantDense
        >>> dense, x = nn.Dense(64), jnp.ones((2, 256))
        >>> layer, variables = QuantDense.from_dense(dense, dense.init(jax.random.key(0), x), bits=8)
        >>> layer.apply(variables, x).shape
        (2, 64)
        """
        _layer.check_type("QuantDense.from_dense", "dense", dense, nn.Dense)
        own = {field.name for field in dataclasses.fields(cls)} - {"parent"}
        shared = {field.name for field in dataclasses.fields(dense)} & own
        layer = cls(
            **{name: getattr(dense, name) for name in shared},
            bits=bits,  # pyright: ignore[reportArgumentType]
            format=format,
            group_size=group_size,  # pyright: ignore[reportArgumentType]
            symmetric=symmetric,
            method=method,
            scale_dtype=scale_dtype,
            implementation=implementation,
        )
        _check(layer)
        params = dict(variables["params"])
        kernel = _quantized(layer, params.pop("kernel"))
        others = {name: collection for name, collection in variables.items() if name != "params"}
        return layer, others | ({"params": params} if params else {}) | {"quant": {"kernel": kernel}}


def _check(layer: QuantDense) -> None:
    _layer.check_precision("QuantDense", layer.precision)
    for name, default in _NO_HOOKS.items():
        _layer.check_default("QuantDense", name, getattr(layer, name), default)


def _quantized(layer: QuantDense, kernel) -> dict[str, Any]:
    """The arrays for a kernel (..., in, out), in boxes if it comes in one."""
    w = quantize(
        nn.meta.unbox(kernel),
        bits=layer.bits,
        format=layer.format,
        group_size=layer.group_size,
        symmetric=layer.symmetric,
        method=layer.method,
        in_axis=-2,
        scale_dtype=layer.scale_dtype,
    )
    arrays = {name: a for name in ARRAYS if (a := getattr(w, name)) is not None}
    return _layer.in_boxes(kernel, arrays, lambda names, ndim: (*names[:-2], names[-1], names[-2]))
