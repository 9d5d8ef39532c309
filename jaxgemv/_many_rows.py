"""The product in XLA for more rows than kernels are made for: the weight once in x's own dtype, and a matmul of that.

Up to 64 rows a product keeps to float32. Above, reading the weights no longer is what takes the time, and the product
is what it would be with a dense weight of x's dtype: codes become float32 weights, which are rounded once to float16 or
bfloat16, and sums are in float32. In float16 a weight must lie within 65504, and what is below 6e-5 loses bits, as in
any float16 model. With float32 x the matmul has `jax.default_matmul_precision`, as `jnp.dot` has. int8 x and a weight
with one scale a row are multiplied as bytes, exactly; with other weights int8 x is float32.

A GPU makes the weight in one kernel, which reads packed words and writes 16 bits; nothing else of its size is
allocated. It is the compiled one, of csrc/cuda/dequantize, or where that is not there, XLA's loop.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgemv import _around, _dispatch, _reference
from jaxgemv._check import FLOATS
from jaxgemv._ffi import TARGET, cpu_has_bfloat16
from jaxgemv._format import pad_last, spread, unpack, weights, whole_words
from jaxgemv._operands import Operands, Static

# K for which sums of products of bytes are within int32, with room for a zero.
_INTEGER_K = 1 << 16


def takes(o: Operands, s: Static) -> bool:
    """Whether a product that has no kernel runs here, and not by the reference."""
    if _around.has_parts(o, s) and not (o.x.dtype in FLOATS and _around.only_scales(o, s)):
        return False
    scaled = o.x.dtype in FLOATS or o.scale is not None
    return o.many and scaled and s.implementation != "reference"


def product(o: Operands, s: Static, *, platform: str | None) -> Array:
    """x (*P, *L, K) times the weight's rows, (*P, *L, N); see Operands and Static. Without the parts around it, but for
    a global scale: that goes into the weight, since behind the product it would be one more pass over the result."""
    if o.x.dtype not in FLOATS:
        if _has_row_scales(o) and o.x.shape[-1] <= _INTEGER_K:
            n = o.packed.shape[-2]
            return _reference.of_entries(partial(_of_integers, s=s), o, s, n, nbytes=n * o.x.shape[-1])
        o = o._replace(x=o.x.astype(np.float32))
    dtype = s.dtype_before_norm or o.x.dtype
    # XLA converts other products on a CPU to float32, and so would read and write more.
    is_fast = s.k is not None and dtype == jnp.bfloat16 and cpu_has_bfloat16()
    if platform == "cpu" and not is_fast:
        dtype = np.dtype(np.float32)
    n, k = o.packed.shape[-2], s.k or o.x.shape[-1]
    form = dict(bits=s.bits, group=s.group, k=k)
    make = partial(_by_kernel if _dispatch.dequantizes(platform, o, s) else _by_xla, dtype=dtype, **form)
    one = partial(_one, s=s)
    width = n if s.k is None else k
    return _reference.of_entries(
        one, o, s, width, nbytes=dtype.itemsize * n * k, pick=partial(_pick, make=make)
    )


def _has_row_scales(o: Operands) -> bool:
    """Whether codes are integers with one scale a row, and zeros or offsets have no groups either."""
    own = 0 if o.index is None else 1
    parameters = [a for a in (o.scale, o.zero, o.offset) if a is not None]
    by_row = all(a.ndim - own < 2 or a.shape[-1] == 1 for a in parameters)
    return by_row and _dispatch.format_of(o) == "affine"


def _of_integers(x: Array, w: Mapping[str, Array], *, s: Static) -> Array:
    """int8 x (..., K) to float32 (..., N): the exact sum of x * (q - 2^(b-1)), which are bytes, and that of x alone."""
    mid = 1 << s.bits - 1
    codes = unpack(w["packed"], s.bits, x.shape[-1]) - np.uint8(mid)
    dot = _reference.contract(x, jax.lax.bitcast_convert_type(codes, np.int8), out_dtype=np.int32)
    row = partial(spread, ndim=2, group=None, k=1)  # (N, 1) or (1, 1)
    scale = row(w["scale"])[:, 0]
    y = dot.astype(np.float32) * scale
    if "offset" in w:
        shift = scale * mid + row(w["offset"])[:, 0]
    elif "zero" in w:
        shift = scale * (mid - row(w["zero"])[:, 0])
    else:
        return y
    return y + x.astype(np.int32).sum(-1, keepdims=True).astype(np.float32) * shift


def _pick(w: Mapping[str, Array], entry: Array | None, *, make: Callable) -> dict[str, Array]:
    """The weight (N, K or more) and the bias of that entry of a stack, or of the one matrix."""
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
        return product(x, weight, transposed=True)[..., : s.k]
    return product(pad_last(x, weight.shape[-1] - x.shape[-1]), weight)


def _by_xla(w: Mapping[str, Array], entry: Array | None, *, dtype: np.dtype, **form) -> Array:
    return weights(**_reference.pick(w, entry), **form).astype(dtype)


def _by_kernel(
    w: Mapping[str, Array], entry: Array | None, *, dtype: np.dtype, bits: int, group: int | None, k: int
) -> Array:
    """The transposed product with the identity, which reads a stack where it is. Rows are padded to whole 16 bytes."""
    w = {**w, "packed": whole_words(w["packed"])}
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
        return call(entry, w), True  # vmapped over entries alone

    return call(entry, w)
