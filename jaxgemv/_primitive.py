"""gemv_p, the one operation that all public functions bind, and its JAX rules.

Operands are named: `bind(*arrays, names=("x", "packed", "scale", ...), ...)` carries only those there are.
x is (*P, *L, K). Without "index", P is empty, the weight is one matrix, (N, words), and its parameters are (),
(N,) or (N, G). With "index", int32 (*P), each array of the weight has a leading stack dimension, S or 1, and
slice p of x meets entry index[p]. That one extra operand serves layers, experts, and vmap over weights.

With k=None the product is that with the weight's rows, (*P, *L, N). With k=K it is the transposed one: x is
(*P, *L, N), there is no bias, and the result (*P, *L, K). Each is the other's transpose.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxgemv import _experts, _reference
from jaxgemv._ffi import TARGET, TRANSPOSED_TARGET, backends

# Above this many rows for one matrix, dequantising once and a matmul of XLA's take over, unless a kernel serves more.
MAX_ROWS = 64

_STATIC = ("names", "op", "bits", "group", "k", "out_dtype", "implementation")

gemv_p = Primitive("jaxgemv_gemv")
# Outside jit: one jitted function for all calls, so that only a new shape compiles.
gemv_p.def_impl(jax.jit(lambda *args, **params: gemv_p.bind(*args, **params), static_argnames=_STATIC))


@gemv_p.def_abstract_eval
def _abstract_eval(*avals, names, k, out_dtype, **_):
    named = dict(zip(names, avals, strict=True))
    x, packed = named["x"], named["packed"]
    width = packed.shape[-2] if k is None else k
    return x.update(shape=(*x.shape[:-1], width), dtype=out_dtype, weak_type=False)


def why_no_kernel(platform: str, named: dict, bits: int, k: int | None = None) -> str | None:
    """Why the platform's compiled kernels cannot run these operands; None when they can."""
    backend = backends[platform]
    x = named["x"]
    if backend.missing:
        return f"the {platform} backend is {backend.missing}"
    if "codebook" in named:
        return f"the {platform} backend has no codebook kernel"
    if "scale" not in named or not backend.supports(bits, x.dtype, transposed=k is not None):
        what = f"bits = {bits} and x of dtype {x.dtype}"
        return f"the {platform} backend has no kernel for {what if k is None else f'gradients with {what}'}"
    return None


def _rows(named: dict) -> int:
    """Rows of x that meet one matrix."""
    prefix = named["index"].ndim if "index" in named else 0
    return prod(named["x"].shape[prefix:-1])


def _reference_call(*args, names, op, implementation, **params):
    del op, implementation
    return _reference.product(**dict(zip(names, args, strict=True)), **params)


def _kernel_call(*args, names, platform, op, bits, group, k, out_dtype, implementation):
    """The FFI call: x as (B, M, its width), the weight's arrays stacked, absent ones empty."""
    del op, implementation
    named = dict(zip(names, args, strict=True))
    x, index = named.pop("x"), named.pop("index", None)
    prefix = 0 if index is None else index.ndim
    batch, rows = prod(x.shape[:prefix]), prod(x.shape[prefix:-1])
    target, width = (TARGET, named["packed"].shape[-2]) if k is None else (TRANSPOSED_TARGET, k)
    if index is None:
        named = {name: a[None] for name, a in named.items()}
    absent = jnp.zeros((0,), jnp.float32)
    weight = [named.get(name, absent) for name in ("packed", "scale", "zero", "offset", "bias")]
    attributes = {"bits": np.int64(bits), "group": np.int64(group or k or x.shape[-1])}

    def call(x, index):
        y = jax.ShapeDtypeStruct((*x.shape[:-1], width), out_dtype)
        return jax.ffi.ffi_call(target, y)(x, *weight, index, **attributes)

    slices = x.reshape(batch, rows, x.shape[-1])
    if index is None:
        y = call(slices, absent)
    else:
        stack = max(a.shape[0] for a in named.values())
        nbytes = prod(named["packed"].shape[1:]) * named["packed"].dtype.itemsize
        share = min(MAX_ROWS, backends[platform].rows_of(bits, x.dtype, k is not None))
        size = _experts.tile_size(batch, rows, stack, nbytes=nbytes, share=share, platform=platform)
        if size > 1:
            call = partial(_experts.in_tiles, call, stack=stack, size=size)
        y = call(slices, index.reshape(batch))
    return y.reshape(*x.shape[:-1], width)


def why_reference(avals, platform: str | None, obstacle: str | None = None, *, names, **params) -> str | None:
    """Why the kernels of `platform` (None: it has none) cannot run; None when they can.

    Raises NotImplementedError for a named implementation that this leaves out.
    """
    implementation = params["implementation"]
    if obstacle:
        reason = obstacle
    elif platform is None:
        reason = "this platform has no compiled kernels"
    elif implementation not in (None, platform):
        reason = f"the program is lowered for {platform}"
    else:
        reason = why_no_kernel(platform, dict(zip(names, avals, strict=True)), params["bits"], params["k"])
    if implementation in backends and reason:
        raise NotImplementedError(f"{params['op']}: implementation={implementation!r} cannot run: {reason}")
    return reason


def lower(ctx, *args, platform: str | None, obstacle: str | None = None, **params):
    """On one device: one kernel, or where there is an obstacle the reference."""
    reason = why_reference(ctx.avals_in, platform, obstacle, **params)
    use_kernel = (
        platform and not reason and (params["implementation"] or _few(platform, ctx.avals_in, **params))
    )
    call = partial(_kernel_call, platform=platform) if use_kernel else _reference_call
    return mlir.lower_fun(partial(call, **params), multiple_results=False)(ctx, *args)


def _few(platform: str, avals, *, names, bits, k, **params) -> bool:
    """Whether the rows of x are too few for dequantising to be worth it."""
    named = dict(zip(names, avals, strict=True))
    rows = _rows(named)
    # Under jax.export it may be symbolic, and then may be small.
    return not isinstance(rows, int) or rows <= most_rows(platform, bits, named["x"].dtype, k is not None)


def most_rows(platform: str, bits: int, x_dtype, transposed: bool = False) -> int:
    """Rows of x, above which the weight is dequantised and XLA multiplies."""
    return max(MAX_ROWS, backends[platform].rows_of(bits, x_dtype, transposed))


def batch(args, dims, *, names, **params):
    """Over x alone: one call with more rows. Over a weight or an index: one indexed call."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    named = dict(zip(names, args, strict=True))
    mapped = {name: d for name, d in zip(names, dims, strict=True) if d is not None}
    bind = partial(_bind, **params)
    prefix = named["index"].ndim if "index" in named else 0
    if set(mapped) == {"x"}:
        # Behind the prefix, where it counts as rows of one matrix.
        named["x"] = jnp.moveaxis(named["x"], mapped["x"], prefix)
        return bind(named), prefix

    named = {n: jnp.moveaxis(a, mapped[n], 0) if n in mapped else a[None] for n, a in named.items()}
    named["x"] = jnp.broadcast_to(named["x"], (size, *named["x"].shape[1:]))
    weights = [name for name in names if name not in ("x", "index")]
    if "index" not in names:
        named["index"] = jnp.arange(size, dtype=jnp.int32)
        return bind(named), 0
    index = jnp.broadcast_to(named["index"], (size, *named["index"].shape[1:]))
    if mapped.keys() & set(weights):
        # Stacks of stacks become one, and an index must not reach into a neighbour's.
        stack = max(named[name].shape[1] for name in weights)
        start = jnp.arange(size, dtype=jnp.int32).reshape(size, *(1,) * (index.ndim - 1)) * np.int32(stack)
        index = jnp.where((index >= 0) & (index < stack), index + start, np.int32(-1))
        named |= {name: _merge_stacks(named[name], size, stack) for name in weights}
    else:
        named |= {name: named[name][0] for name in weights}
    return bind(named | {"index": index}), 0


def _bind(named: dict, **params):
    return gemv_p.bind(*named.values(), names=tuple(named), **params)


def _merge_stacks(a, size: int, stack: int):
    """(size | 1, stack | 1, ...) -> (size * stack, ...), or (1, ...) when one entry serves all."""
    if a.shape[:2] == (1, 1):
        return a[0]
    return jnp.broadcast_to(a, (size, stack, *a.shape[2:])).reshape(size * stack, *a.shape[2:])


def _jvp(primals, tangents, *, names, **params):
    """Linear in x, by the kernel; the weight's float arrays through the reference."""
    y = gemv_p.bind(*primals, names=names, **params)
    named = dict(zip(names, primals, strict=True))
    moving = {n: t for n, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
    terms = []
    if "x" in moving:
        linear = {n: a for n, a in named.items() if n != "bias"} | {"x": moving.pop("x")}
        terms.append(_bind(linear, **params))
    if moving:
        at = {n: named[n] for n in moving}
        terms.append(jax.jvp(lambda d: _as_reference(named | d, params), (at,), (moving,))[1])
    return y, sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(y).to_tangent_aval())


def _as_reference(named: dict, params: dict):
    return _reference_call(*named.values(), names=tuple(named), **params)


ad.primitive_jvps[gemv_p] = _jvp


def _transpose(ct, *args, names, **params):
    """With respect to x by the kernel, to any other operand in which the product is linear by the reference."""
    named = dict(zip(names, args, strict=True))
    unknown = {n: a.aval for n, a in named.items() if ad.is_undefined_primal(a)}
    if type(ct) is ad.Zero:
        return [ad.Zero(unknown[n]) if n in unknown else None for n in names]
    cotangents = {}
    if "x" in unknown:
        x = unknown.pop("x")
        cotangents["x"] = _transposed(ct, x, {n: a for n, a in named.items() if n != "bias"}, params)
        named["x"] = jnp.zeros(x.shape, x.dtype)  # on which the others do not depend
    if unknown:
        linear = jax.linear_transpose(lambda u: _as_reference(named | u, params), unknown)
        cotangents |= linear(ct)[0]
    return [cotangents.get(n) for n in names]


def _transposed(ct, x, named: dict, params: dict):
    """The cotangent of x, which is given as its aval, in the product with `named`."""
    k = x.shape[-1] if params["k"] is None else None
    y = _bind(named | {"x": ct}, **params | {"k": k, "out_dtype": x.dtype})
    if "index" not in named:
        return y
    # The NaN that an index out of range gives does not depend on x.
    arrays = [a for n, a in named.items() if n not in ("x", "index")]
    return _reference.select(_reference.in_range(named["index"], arrays), y, np.zeros((), y.dtype))


ad.primitive_transposes[gemv_p] = _transpose
