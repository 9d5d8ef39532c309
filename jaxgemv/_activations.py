"""From float activations to int8 ones."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxgemv._arguments import check_x
from jaxgemv._check import FLOATS, check_group_size

_LARGEST = 127


def quantize_activations(x: ArrayLike, *, group_size: int | None = None) -> tuple[Array, Array]:
    """int8 x and its float32 scale, (..., K) and (..., G), for `gemv(x, w, x_scale=scale)`.

    Symmetric: the largest magnitude of a row, or with group_size of each group of so many along K, becomes 127; zeros
    get a scale of 0. What is not finite gives a scale of NaN.

    - x: float16, bfloat16 or float32 (..., K). group_size: a divisor of K, 32 as in llama.cpp, say; None for one scale
      a row, G = 1.

    Raises TypeError for dtypes, ValueError for shapes and group_size.

    >>> import jax.numpy as jnp, jaxgemv
    >>> x, x_scale = jaxgemv.quantize_activations(jnp.array([254.0, -100.0, 4.0, 0.0]))
    >>> x, x_scale
    (Array([127, -50,   2,   0], dtype=int8), Array([2.], dtype=float32))
    >>> w = jaxgemv.QuantizedTensor.from_codes(jnp.array([[1, 2, 3, 4]]), jnp.ones(1), zero=jnp.zeros(1), bits=4)
    >>> jaxgemv.gemv(x, w, x_scale=x_scale)
    Array([66.], dtype=float32)
    """
    op = "quantize_activations"
    x = check_x(op, x, FLOATS)
    k = x.shape[-1]
    if group_size is not None:
        group_size = check_group_size(op, group_size)
        if k % group_size:
            raise ValueError(f"{op}: group_size must divide K = {k}; got {group_size}")
    return _quantize_activations(x, k if group_size is None else group_size)


@partial(jax.jit, static_argnums=1)
def _quantize_activations(x: Array, group: int) -> tuple[Array, Array]:
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    # XLA's maximum loses NaN on a CPU.
    finite = jnp.all(jnp.isfinite(groups), axis=-1)
    largest = jnp.where(finite, jnp.max(jnp.abs(groups), axis=-1), jnp.nan)
    scale = largest / _LARGEST
    # With the reciprocal of the rounded scale, codes could exceed 127.
    codes = jnp.round(groups * jnp.where(scale > 0, _LARGEST / largest, 0)[..., None])
    return codes.astype(jnp.int8).reshape(x.shape), scale
