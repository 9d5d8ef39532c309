"""`QuantEinsum`: `flax.nnx.Einsum` over a low-bit kernel."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array

from jaxgemv.flax import _layer
from jaxgemv.flax._equation import Equation, einsum
from jaxgemv.flax._kernel import Kernel, Layout
from jaxgemv.flax._nnx.base import Quantized, param

_OP = "QuantEinsum"


class QuantEinsum(Quantized):
    """An einsum of x and a kernel of low-bit codes, with the arguments of `nnx.Einsum`.

    State: as in `QuantLinear`. The kernel's axes that are summed over become K, those that only the result has N, and
    those that x has too stay in front: "BTNH,NHD->BTD" is one product with K = N H.

    - einsum_str: "x,kernel->result". Each label once in an operand; an ellipsis in x and the result alone.
    - kernel_shape, bias_shape, dtype, param_dtype, kernel_init, bias_init, preferred_element_type, rngs,
      kernel_metadata, bias_metadata: as in `nnx.Einsum`. precision: None, DEFAULT or HIGHEST.
    - promote_dtype, einsum_op: only the defaults.
    - implementation, quantize_arguments: as in `QuantLinear`.

    Raises ValueError for the arguments above, NotImplementedError for an einsum_str that is no such product, and what
    `jaxgemv.quantize` and `jaxgemv.gemv` raise.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxgemv.flax.nnx import QuantEinsum
    >>> layer = QuantEinsum("BTNH,NHD->BTD", (8, 32, 64), bits=4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 3, 8, 32))).shape, layer.kernel.tensor.shape
    ((1, 3, 64), (64, 256))
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: Any = default_promote_dtype,
        einsum_op: Any = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        **quantize_arguments: Any,
    ):
        _check(precision, einsum_op, promote_dtype)
        self.einsum_str = einsum_str.replace(" ", "")
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.preferred_element_type = preferred_element_type
        self.implementation = implementation

        layout = self._layout
        kernel = param(kernel_init(rngs.params(), self.kernel_shape, param_dtype), kernel_metadata)
        self._quantize(kernel, layout, quantize_arguments)
        bias = None
        if self.bias_shape is not None:
            bias = param(bias_init(rngs.params(), self.bias_shape, param_dtype), bias_metadata)
        self.bias = nnx.data(bias)

    @property
    def _layout(self) -> Layout:
        return _layout(self.einsum_str, self.kernel_shape)

    @property
    def kernel(self) -> Kernel:
        """The weight: `.shape` is that of the original layer, `.tensor` the `QuantizedTensor` (..., N, K)."""
        return Kernel(self._tensor, self._layout)

    def __call__(self, inputs: Array, einsum_str: str | None = None, out_sharding=None) -> Array:
        """The einsum of inputs and the kernel. einsum_str: another one that sums over the same axes of the kernel."""
        kernel = self.kernel
        equation = Equation.read(_OP, einsum_str or self.einsum_str, len(self.kernel_shape))
        bias = None if self.bias is None else self.bias[...]
        x, out_dtype = _layer.promoted(
            inputs, kernel.tensor, bias, dtype=self.dtype, out_dtype=self.preferred_element_type
        )
        y = einsum(
            _OP,
            equation,
            x,
            kernel,
            out_dtype=out_dtype,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )
        if bias is None:
            return y
        # The bias has those of the result's axes that the kernel has: none that an ellipsis stands for.
        size = dict(zip(equation.kernel, self.kernel_shape))
        shape = [size.get(c, 1) for c in equation.out.replace(".", "." * (y.ndim - len(equation.out) + 1))]
        return y + jnp.reshape(bias, shape).astype(x.dtype)

    @classmethod
    def from_einsum(
        cls, layer: nnx.Einsum, *, implementation: str | None = None, **quantize_arguments: Any
    ) -> "QuantEinsum":
        """The layer that stands for an `nnx.Einsum`, with a copy of its bias; as `QuantLinear.from_linear`.

        >>> from flax import nnx
        >>> from jaxgemv.flax.nnx import QuantEinsum
        >>> layer = QuantEinsum.from_einsum(nnx.Einsum("bk,kn->bn", (256, 64), rngs=nnx.Rngs(0)), bits=2)
        >>> layer.kernel.shape, layer.kernel.tensor.bits
        ((256, 64), 2)
        """
        _layer.check_type("QuantEinsum.from_einsum", "layer", layer, nnx.Einsum)
        return cls._of(nnx.clone(layer), implementation=implementation, **quantize_arguments)

    @classmethod
    def _of(cls, layer: nnx.Einsum, **arguments: Any) -> "QuantEinsum":
        return cls(
            layer.einsum_str,
            layer.kernel_shape,
            layer.bias_shape,
            dtype=layer.dtype,
            param_dtype=layer.param_dtype,
            precision=layer.precision,
            kernel_init=lambda *_: layer.kernel,
            bias_init=lambda *_: layer.bias,
            promote_dtype=layer.promote_dtype,
            einsum_op=layer.einsum_op,
            preferred_element_type=layer.preferred_element_type,
            rngs=nnx.Rngs(0),
            **arguments,
        )


def einsum_layout(layer: nnx.Einsum) -> Layout:
    """The layout of the layer's kernel. Raises ValueError and NotImplementedError where a `QuantEinsum` would."""
    _check(layer.precision, layer.einsum_op, layer.promote_dtype)
    return _layout(layer.einsum_str, layer.kernel_shape)


def _check(precision, einsum_op, promote_dtype) -> None:
    _layer.check_precision(_OP, precision)
    _layer.check_default(_OP, "einsum_op", einsum_op, jnp.einsum)
    _layer.check_default(_OP, "promote_dtype", promote_dtype, default_promote_dtype)


def _layout(einsum_str: str, kernel_shape: Sequence[int]) -> Layout:
    return Equation.read(_OP, einsum_str, len(kernel_shape)).layout(tuple(kernel_shape))
