"""The product in XLA for more rows than kernels are made for: the weight once in x's own dtype, and a matmul of that.

Up to 64 rows a product keeps to float32. Above, reading the weights no longer is what takes the time, and the product
is what it would be with a dense weight of x's dtype: codes become float32 weights, which are rounded once to float16 or
bfloat16, and sums are in float32. In float16 a weight must lie within 65504, and what is below 6e-5 loses bits, as in
any float16 model. With float32 x the matmul has `jax.default_matmul_precision`, as `jnp.dot` has.

A GPU makes the weight in one kernel, which reads packed words and writes 16 bits; nothing else of its size is
allocated. It is the compiled one, of csrc/cuda/dequantize, or where that is not there, XLA's loop.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import jax
import numpy as np
from jax import Array

from jaxgemv import _dispatch, _reference
from jaxgemv._check import FLOATS
from jaxgemv._ffi import TARGET
from jaxgemv._format import pad_last, weights
from jaxgemv._operands import Operands, Static


def takes(o: Operands, s: Static) -> bool:
    """Whether this is for it, and not for the reference, where there is no kernel. Integer products are exact."""
    return o.many and o.x.dtype in FLOATS and s.implementation != "reference"


def product(o: Operands, s: Static, *, platform: str | None) -> Array:
    """x (*P, *L, K) times the weight's rows, (*P, *L, N); see Operands and Static. Without the parts around it."""
    # A CPU without instructions for 16 bits is several times slower in them.
    dtype = np.dtype(np.float32) if platform == "cpu" else s.x_dtype or o.x.dtype
    n, k = o.packed.shape[-2], s.k or o.x.shape[-1]
    form = dict(bits=s.bits, group=s.group, k=k)
    make = partial(_by_kernel if _dispatch.dequantizes(platform, o, s) else _by_xla, dtype=dtype, **form)
    one = partial(_one, s=s)
    width = n if s.k is None else k
    return _reference.of_entries(
        one, o, s, width, nbytes=dtype.itemsize * n * k, pick=partial(_pick, make=make)
    )


def _pick(w: Mapping[str, Array], entry: Array | None, *, make: Callable) -> dict[str, Array]:
    """Of that entry of a stack, or of the one matrix, the weight (N, K or more), and bias."""
    rest = dict(w)
    bias = {"bias": rest.pop("bias")} if "bias" in rest else {}
    return {"weight": make(rest, entry), **_reference.pick(bias, entry)}


def _one(x: Array, w: Mapping[str, Array], *, s: Static) -> Array:
    """x (..., K) and what `_pick` gives, to (..., N): in x's dtype if that is the result's, else in float32."""
    weight = w["weight"]
    dtype = weight.dtype if s.out_dtype == weight.dtype and "bias" not in w else np.dtype(np.float32)
    product = partial(_reference.contract, precision=s.precision or "default", out_dtype=dtype)
    x = x.astype(weight.dtype)
    if s.k is not None:
        return product(x, weight.T)[..., : s.k]
    return product(pad_last(x, weight.shape[-1] - x.shape[-1]), weight)


def _by_xla(w: Mapping[str, Array], entry: Array | None, *, dtype: np.dtype, **form) -> Array:
    return weights(**_reference.pick(w, entry), **form).astype(dtype)


def _by_kernel(
    w: Mapping[str, Array], entry: Array | None, *, dtype: np.dtype, bits: int, group: int | None, k: int
) -> Array:
    """The transposed product with the identity, which reads a stack where it is. Rows are padded to whole 16 bytes."""
    if entry is None:
        w = {name: a[None] for name, a in w.items()}
    shape = w["packed"].shape[-2], k + -k % (16 // dtype.itemsize)
    attributes = dict(bits=np.int64(bits), group=np.int64(group or k), k=np.int64(k), transposed=True)

    @jax.custom_batching.custom_vmap
    def call(entry, w):
        entries = {} if entry is None else {"index": entry.reshape(-1)}
        named = Operands(x=None, **w, **entries).items()
        slices = () if entry is None else entry.shape
        result = jax.ShapeDtypeStruct((prod(slices), *shape), dtype)
        y = jax.ffi.ffi_call(TARGET, result)(*named.values(), operands=",".join(named), **attributes)
        return y.reshape(*slices, *shape)

    @call.def_vmap
    def _(_size, _batched, entry, w):
        return call(entry, w), True  # over entries alone

    return call(entry, w)
