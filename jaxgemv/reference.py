"""`reference.gemv`: the same function as `jaxgemv.gemv`, always in plain jax.numpy and in float32."""

from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxgemv import _ops
from jaxgemv._tensor import QuantizedTensor


def gemv(
    x: ArrayLike,
    w: QuantizedTensor | ArrayLike,
    *,
    index: ArrayLike | None = None,
    norm: ArrayLike | None = None,
    eps: float = 1e-5,
    round_norm: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    x_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """`jaxgemv.gemv` without kernels, for any number of rows: dequantises to float32, then one float32 dot product.

    With `implementation="xla"` there are no kernels either, and more than 64 rows are rounded as by default. Arguments
    and errors are those of `jaxgemv.gemv`.

    >>> import jax.numpy as jnp, jaxgemv
    >>> codes = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    >>> w = jaxgemv.QuantizedTensor.from_codes(codes, jnp.ones(2), zero=jnp.zeros(2), bits=4)
    >>> jaxgemv.reference.gemv(jnp.array([1.0, 0.0, 0.0, 2.0]), w)
    Array([ 9., 21.], dtype=float32)
    """
    return _ops.gemv(
        x,
        w,
        index=index,
        norm=norm,
        eps=eps,
        round_norm=round_norm,
        bias=bias,
        activation=activation,
        residual=residual,
        x_scale=x_scale,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        implementation="reference",
    )
