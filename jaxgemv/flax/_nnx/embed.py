"""`QuantEmbed`: `flax.nnx.Embed` over low-bit codes."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_embed_init
from flax.typing import Dtype, Initializer
from jax import Array

from jaxgemv import QuantizedTensor, gemv
from jaxgemv.flax import _layer
from jaxgemv.flax._kernel import Layout
from jaxgemv.flax._nnx.base import Quantized, array_of, param

_OP = "QuantEmbed"


class QuantEmbed(Quantized):
    """An embedding with the arguments of `nnx.Embed` and a table of low-bit codes, of which rows are looked up.

    State: the arrays of a `jaxgemv.QuantizedTensor` of shape (num_embeddings, features), as in `QuantLinear`. Only the
    rows that are asked for are dequantised.

    - num_embeddings, features, dtype, param_dtype, embedding_init, rngs, embedding_metadata: as in `nnx.Embed`.
    - promote_dtype: only the default.
    - implementation, of `attend`, and quantize_arguments: as in `QuantLinear`.

    Raises ValueError for promote_dtype, and what `jaxgemv.quantize` raises.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxgemv.flax.nnx import QuantEmbed
    >>> embed = QuantEmbed(1000, 256, bits=8, rngs=nnx.Rngs(0))
    >>> x = embed(jnp.array([3, 1, 4]))
    >>> x.shape, embed.attend(x).shape
    ((3, 256), (3, 1000))
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: Any = default_promote_dtype,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        **quantize_arguments: Any,
    ):
        _layer.check_default(_OP, "promote_dtype", promote_dtype, default_promote_dtype)
        self.num_embeddings = num_embeddings
        self.features = features
        self.param_dtype = param_dtype
        self.implementation = implementation
        init = embedding_init(rngs.params(), (num_embeddings, features), param_dtype)
        table = param(init, embedding_metadata)
        self.dtype = dtype or array_of(table).dtype
        self._quantize(table, _layout(num_embeddings, features), quantize_arguments)

    @property
    def embedding(self) -> QuantizedTensor:
        """The table, (num_embeddings, features): `embedding[ids]` are rows, `x @ embedding.T` is a product."""
        return self._tensor

    def __call__(self, inputs: Array, out_sharding=None) -> Array:
        """Integers (...) to their rows, (..., features); of one out of range NaN, as in `nnx.Embed`.

        out_sharding: for Explicit axes. Raises ValueError for inputs that are no integers.
        """
        inputs = jnp.asarray(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"{_OP}: inputs must be an integer array; got {inputs.dtype}")
        if self.num_embeddings == 1:  # every input means this row
            inputs = jnp.zeros_like(inputs)
        rows = partial(_rows, dtype=self.dtype)
        if out_sharding is not None:
            rows = jax.sharding.auto_axes(out_sharding=out_sharding)(rows)
        return rows(self.embedding, inputs)

    def attend(self, query: Array, out_sharding=None) -> Array:
        """(..., features) times each row: (..., num_embeddings). out_sharding and errors: as in `jaxgemv.gemv`."""
        return gemv(
            jnp.asarray(query, self.dtype),
            self.embedding,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )

    @classmethod
    def from_embed(
        cls, embed: nnx.Embed, *, implementation: str | None = None, **quantize_arguments: Any
    ) -> "QuantEmbed":
        """The layer that stands for an `nnx.Embed`; as `QuantLinear.from_linear`.

        >>> from flax import nnx
        >>> from jaxgemv.flax.nnx import QuantEmbed
        >>> QuantEmbed.from_embed(nnx.Embed(1000, 256, rngs=nnx.Rngs(0)), bits=8).embedding.shape
        (1000, 256)
        """
        _layer.check_type("QuantEmbed.from_embed", "embed", embed, nnx.Embed)
        return cls._of(embed, implementation=implementation, **quantize_arguments)

    @classmethod
    def _of(cls, embed: nnx.Embed, **arguments: Any) -> "QuantEmbed":
        return cls(
            embed.num_embeddings,
            embed.features,
            dtype=embed.dtype,
            param_dtype=embed.param_dtype,
            embedding_init=lambda *_: embed.embedding,
            promote_dtype=embed.promote_dtype,
            rngs=nnx.Rngs(0),
            **arguments,
        )


def embed_layout(embed: nnx.Embed) -> Layout:
    """The layout of the layer's table. Raises ValueError where a `QuantEmbed` would."""
    _layer.check_default(_OP, "promote_dtype", embed.promote_dtype, default_promote_dtype)
    return _layout(embed.num_embeddings, embed.features)


def _layout(num_embeddings: int, features: int) -> Layout:
    return Layout((num_embeddings, features), inner=(1,))


# Compiled, where an index out of range gives NaN and is no IndexError.
@partial(jax.jit, static_argnames="dtype")
def _rows(table: QuantizedTensor, ids: Array, *, dtype) -> Array:
    return table[ids].dequantize(dtype)
