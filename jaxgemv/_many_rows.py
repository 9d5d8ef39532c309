"""The product in XLA for more rows than kernels are made for: the weight once in x's own dtype, and a matmul of that.

Up to 64 rows a product keeps to float32. Above, reading the weights no longer is what takes the time, and the product
is what it would be with a dense weight of x's dtype: codes become float32 weights, which are rounded once to float16 or
bfloat16, and sums are in float32. In float16 a weight must lie within 65504, and what is below 6e-5 loses bits, as in
any float16 model. With float32 x the matmul has `jax.default_matmul_precision`, as `jnp.dot` has.

A GPU makes the weight in one loop, which reads packed words and writes 16 bits; nothing else of its size is allocated.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from jax import Array

from jaxgemv import _reference
from jaxgemv._check import FLOATS
from jaxgemv._format import weights
from jaxgemv._operands import Operands, Static


def takes(o: Operands, s: Static) -> bool:
    """Whether this is for it, and not for the reference, where there is no kernel. Integer products are exact."""
    return o.many and o.x.dtype in FLOATS and s.implementation != "reference"


def product(o: Operands, s: Static, *, platform: str | None) -> Array:
    """x (*P, *L, K) times the weight's rows, (*P, *L, N); see Operands and Static. Without the parts around it."""
    # A CPU without instructions for 16 bits is several times slower in them.
    dtype = np.dtype(np.float32) if platform == "cpu" else s.x_dtype or o.x.dtype
    n, k = o.packed.shape[-2], s.k or o.x.shape[-1]
    one = partial(_one, s=s, dtype=dtype)
    return _reference.of_entries(one, o, s, n if s.k is None else k, nbytes=dtype.itemsize * n * k)


def _one(x: Array, w: Mapping[str, Array], *, s: Static, dtype: np.dtype) -> Array:
    """x (..., K) and the arrays of one matrix, to float32 (..., N)."""
    w = {name: a for name, a in w.items() if name != "bias"}
    weight = weights(**w, bits=s.bits, group=s.group, k=s.k or x.shape[-1]).astype(dtype)
    return _reference.contract(x.astype(dtype), weight if s.k is None else weight.T, s.precision or "default")
