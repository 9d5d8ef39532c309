"""`QuantLinear`: `flax.nnx.Linear` and `flax.nnx.LinearGeneral` over a low-bit kernel."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array, lax

from jaxgemv.flax import _layer
from jaxgemv.flax._kernel import Kernel, Layout, dot_general
from jaxgemv.flax._nnx.base import Quantized, param

_OP = "QuantLinear"


class QuantLinear(Quantized):
    """A linear layer with the arguments of `nnx.Linear`, or of `nnx.LinearGeneral`, and a kernel of low-bit codes.

    State: `bias`, an `nnx.Param`, and the arrays of a `jaxgemv.QuantizedTensor` of shape (out_features,
    in_features), each a `QuantizedKernel`: `packed`, `scale`, and `zero` unless symmetric, or what the format has
    instead (an imported kernel may bring others). Several features become one, those of `batch_axis` stay in front.
    Axis names on the kernel (`nnx.with_partitioning`, `kernel_metadata`) pass to its arrays, out before in.

    - in_features, out_features, axis, batch_axis: as in `nnx.LinearGeneral`. By default the last axis of x.
    - use_bias, dtype, param_dtype, kernel_init, bias_init, preferred_element_type, rngs, kernel_metadata,
      bias_metadata: as in `nnx.Linear`. The result has the computation's dtype, to which the kernel adds the dtype
      of its scale, unless `preferred_element_type` is given.
    - precision: None, DEFAULT or HIGHEST, all of which mean float32 sums.
    - dot_general, promote_dtype: only the defaults.
    - implementation: as in `jaxgemv.gemv`.
    - quantize_arguments: bits, format, group_size, symmetric, method, scale_dtype and importance of
      `jaxgemv.quantize`; the attributes bits and group_size are those of the format, or the defaults.

    Raises ValueError for the arguments above, and what `jaxgemv.quantize` and `jaxgemv.gemv` raise.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxgemv.flax.nnx import QuantLinear
    >>> layer = QuantLinear(256, 64, bits=4, group_size=32, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 256))).shape, layer.kernel.shape, layer.kernel.tensor.shape
    ((2, 64), (256, 64), (64, 256))
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = MappingProxyType({}),
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Any = lax.dot_general,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        **quantize_arguments: Any,
    ):
        _check(precision, dot_general, promote_dtype)
        self.in_features = _many(in_features) if isinstance(in_features, Sequence) else in_features
        self.out_features = _many(out_features) if isinstance(out_features, Sequence) else out_features
        self.axis = _many(axis) if isinstance(axis, Sequence) else axis
        self.batch_axis = FrozenDict(batch_axis)
        if len(_many(axis)) != len(_many(in_features)):
            raise ValueError(
                f"{_OP}: axis must have as many entries as in_features, {in_features}; got {axis}"
            )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.preferred_element_type = preferred_element_type
        self.implementation = implementation

        layout = self._layout
        flat = (prod(layout.sizes) // prod(_many(out_features)), prod(_many(out_features)))
        kernel = param(kernel_init(rngs.params(), flat, param_dtype), kernel_metadata, layout.sizes)
        self._quantize(kernel, layout, quantize_arguments)
        bias = None
        if use_bias:
            shape = (*batch_axis.values(), *_many(out_features))
            bias = param(bias_init(rngs.params(), (prod(shape),), param_dtype), bias_metadata, shape)
        self.bias = nnx.data(bias)

    @property
    def _layout(self) -> Layout:
        return _layout(self.batch_axis, self.in_features, self.out_features)

    @property
    def kernel(self) -> Kernel:
        """The weight: `.shape` is that of the original layer, `.tensor` the `QuantizedTensor` (..., N, K)."""
        return Kernel(self._tensor, self._layout)

    def __call__(self, inputs: Array, out_sharding=None) -> Array:
        """Float inputs (..., in_features) to (..., out_features). out_sharding: as in `jaxgemv.gemv`."""
        kernel = self.kernel
        bias = None if self.bias is None else self.bias[...]
        x, out_dtype = _layer.promoted(
            inputs, kernel.tensor, bias, dtype=self.dtype, out_dtype=self.preferred_element_type
        )
        inner, batch = (sorted(a % x.ndim for a in axes) for axes in (_many(self.axis), self.batch_axis))
        return dot_general(
            _OP,
            x,
            kernel,
            ((inner, kernel.layout.inner), (batch, kernel.layout.batch)),
            bias=bias,
            out_dtype=out_dtype,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear | nnx.LinearGeneral,
        *,
        implementation: str | None = None,
        **quantize_arguments: Any,
    ) -> "QuantLinear":
        """The layer that stands for `linear`, an `nnx.Linear` or `nnx.LinearGeneral`, with a copy of its bias.

        A kernel with dimensions in front, as `nnx.vmap` stacks it, becomes a stack. Raises TypeError for another
        layer, also one derived from `nnx.Linear` that computes something else, such as `nnx.LoRALinear`.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxgemv.flax.nnx import QuantLinear
        >>> layer = QuantLinear.from_linear(nnx.Linear(256, 64, rngs=nnx.Rngs(0)), format="nf4")
        >>> layer(jnp.ones((2, 256))).shape, layer.kernel.tensor.codebook.shape
        ((2, 64), (16,))
        """
        kind = nnx.LinearGeneral if isinstance(linear, nnx.LinearGeneral) else nnx.Linear
        _layer.check_type("QuantLinear.from_linear", "linear", linear, kind)
        return cls._of(nnx.clone(linear), implementation=implementation, **quantize_arguments)

    @classmethod
    def _of(cls, linear, **arguments: Any) -> "QuantLinear":
        """The layer for `linear`, with the very same bias."""
        general = isinstance(linear, nnx.LinearGeneral)
        return cls(
            linear.in_features,
            linear.out_features,
            axis=linear.axis if general else -1,
            batch_axis=linear.batch_axis if general else {},
            use_bias=linear.use_bias,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            precision=linear.precision,
            kernel_init=lambda *_: linear.kernel,
            bias_init=lambda *_: linear.bias,
            dot_general=_hook(linear),
            promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type,
            rngs=nnx.Rngs(0),
            **arguments,
        )


def linear_layout(linear: nnx.Linear | nnx.LinearGeneral) -> Layout:
    """The layout of the layer's kernel. Raises ValueError where a `QuantLinear` would."""
    _check(linear.precision, _hook(linear), linear.promote_dtype)
    return _layout(getattr(linear, "batch_axis", {}), linear.in_features, linear.out_features)


def _check(precision, dot_general, promote_dtype) -> None:
    _layer.check_precision(_OP, precision)
    _layer.check_default(_OP, "dot_general", dot_general, lax.dot_general)
    _layer.check_default(_OP, "promote_dtype", promote_dtype, default_promote_dtype)


def _hook(linear):
    hook = linear.dot_general or getattr(linear, "dot_general_cls", None)
    return lax.dot_general if hook is None else hook


def _layout(batch_axis: Mapping[int, int], in_features, out_features) -> Layout:
    sizes = (*batch_axis.values(), *_many(in_features), *_many(out_features))
    batch = tuple(range(len(batch_axis)))
    return Layout(sizes, tuple(len(batch) + i for i in range(len(_many(in_features)))), batch)


def _many(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
