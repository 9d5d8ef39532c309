"""gemv_p, the one operation that all public functions bind, and all its JAX rules, from top to bottom.

`gemv_p.bind(*leaves, tree=, s=)`: the leaves and the tree of `Operands`, and a `Static`. See there for shapes.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad, batching, mlir

from jaxgemv import _around, _dispatch, _grouped, _many_rows, _reference
from jaxgemv._check import ONE_BYTE
from jaxgemv._ffi import TARGET, backends
from jaxgemv._format import whole_words
from jaxgemv._operands import PER_ROW, Operands, Static, in_range, select
from jaxgemv._sharding import auto, explicit
from jaxgemv._ways import Way, way

gemv_p = auto.Primitive("jaxgemv_gemv")


def product(o: Operands, s: Static, out_sharding=None) -> Array:
    """gemv_p, wherever its operands lie."""
    return explicit.wherever(bind, o, s, out_sharding)


def dense_product(o: Operands, s: Static, out_sharding=None) -> Array:
    """The product with a dense weight, which XLA partitions itself unless axes are Explicit."""
    return explicit.wherever(_dense, o, s, out_sharding)


def _dense(o: Operands, s: Static) -> Array:
    return _around.compose(_reference.dense_product, o, s)


def bind(o: Operands, s: Static) -> Array:
    """Binds gemv_p, with x varying over all manual axes that any operand varies over: the rules rely on it."""
    missing = frozenset().union(*map(_varying, jax.tree.leaves(o))) - _varying(o.x)
    if missing:
        axes, x = tuple(sorted(missing)), o.x
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            # The transpose sums the cotangent over devices, whose parts must not be rounded before.
            s, x = s._replace(dtype_before_widening=x.dtype), x.astype(jnp.float32)
        o = o._replace(x=_vary(x, axes))
    leaves, tree = jax.tree.flatten(o)
    return gemv_p.bind(*leaves, tree=tree, s=s)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]  jax 0.8.0


@_vary.defjvp
def _(axes, primals, tangents):
    """A tangent may vary over axes that x does not vary over, and JAX refuses to say so twice."""
    (x,), (tangent,) = primals, tangents
    missing = tuple(axis for axis in axes if axis not in _varying(tangent))
    return _vary(x, axes), _vary(tangent, missing) if missing else tangent


def _varying(a: Array) -> frozenset:
    aval = jax.typeof(a)
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


# Types, and what runs outside jit: one jitted function for all calls, so that only a new shape compiles.


@gemv_p.def_abstract_eval
def _abstract_eval(*avals, tree, s: Static):
    o = tree.unflatten(avals)
    return o.x.update(shape=(*o.x.shape[:-1], _width(o, s)), dtype=s.out_dtype, weak_type=False)


def _width(o: Operands, s: Static) -> int:
    if s.k is not None:
        return s.k
    return o.packed.shape[-2] // (2 if _around.is_gated(s.activation) else 1)


def jaxgemv_gemv(*args, **params):
    return gemv_p.bind(*args, **params)


# JAX's mark of a function that is one operation: jax_debug_nans reports a NaN in its result, and does not look inside.
jaxgemv_gemv._apply_primitive = True  # pyright: ignore[reportFunctionMemberAccess]
_compiled = jax.jit(jaxgemv_gemv, static_argnames=("tree", "s"))


@gemv_p.def_impl
def _impl(*args, **params):
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return _compiled(*args, **params)
    with jax.disable_jit(False):  # or it would come here again
        return _compiled(*args, **params)


# vmap. Over x alone: one call with more rows. Over a weight or an index: one indexed call.

_PARTS = {"norm", "bias", "global_scale"}  # vectors that an index picks, beside the matrices


def _batch(args, dims, *, tree, s: Static):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    o = tree.unflatten(args)
    axes = tuple(dims)
    present, dims = o.items(), tree.unflatten(dims)._asdict()
    mapped = {name for name in present if dims[name] is not None}
    rows = present.keys() & PER_ROW - {"index"}
    if mapped <= rows:
        # Behind the prefix, where it counts as rows of one matrix.
        moved = {name: _at(present[name], dims[name], o.prefix, size) for name in rows}
        return bind(o._replace(**moved), s), o.prefix

    s = s._replace(entry=None)
    weights = o.weight().keys()
    parts, is_stack = mapped & weights, any(present[name].shape[0] != 1 for name in weights - _PARTS)
    if o.index is not None and is_stack and parts and parts <= _PARTS:
        # A stack that is the same for all would be copied for each: so the parts go around the product.
        whole = partial(_around.compose, bind, s=s, with_bias=True)
        return jax.vmap(lambda *args: whole(o=tree.unflatten(args)), in_axes=axes)(*args), 0
    named = {name: _at(a, dims[name], 0, size if name in PER_ROW else 1) for name, a in present.items()}
    if o.index is None:
        named["index"] = jnp.arange(size, dtype=jnp.int32)
    elif mapped & weights:
        # A stack of stacks becomes one, in which an index must not reach into a neighbour's entries.
        index = named["index"]
        stack = max(named[name].shape[1] for name in weights)
        start = jnp.arange(size, dtype=jnp.int32).reshape(size, *(1,) * (index.ndim - 1)) * np.int32(stack)
        named["index"] = jnp.where(in_range(index, stack), index + start, np.int32(-1))
        named |= {name: _merge_stacks(named[name], size, stack) for name in weights}
    else:
        named |= {name: present[name] for name in weights}
    return bind(Operands(**named), s), 0


def _at(a: Array, dim: int | None, place: int, size: int) -> Array:
    """a with its mapped dimension at `place`, or where it has none, with a new one of `size`."""
    if dim is not None:
        return jnp.moveaxis(a, dim, place)
    a = jnp.expand_dims(a, place)
    return jnp.broadcast_to(a, (*a.shape[:place], size, *a.shape[place + 1 :]))


def _merge_stacks(a: Array, size: int, stack: int) -> Array:
    """(size | 1, stack | 1, ...) -> (size * stack, ...), or (1, ...) when one entry serves all."""
    if a.shape[:2] == (1, 1):
        return a[0]
    return jnp.broadcast_to(a, (size, stack, *a.shape[2:])).reshape(size * stack, *a.shape[2:])


batching.primitive_batchers[gemv_p] = lambda args, dims, **params: explicit.batched(
    partial(_batch, **params), args, dims
)


# Derivatives: with respect to x by the kernel, to the weight's float arrays by the reference, and of the parts around
# the product, which need not be linear, by JAX.


def _jvp(primals, tangents, *, tree, s: Static):
    o: Operands = tree.unflatten(primals)
    moving = {name: t for name, t in tree.unflatten(tangents).items().items() if type(t) is not ad.Zero}
    moving.pop("packed", None)  # float8 weights have none: it would have to be float8 too
    if o.scale is not None and o.scale.dtype in ONE_BYTE:
        moving.pop("scale", None)
    at = {name: getattr(o, name) for name in moving}
    if _around.has_parts(o, s) and moving:
        return jax.jvp(lambda d: _around.compose(bind, o._replace(**d), s), (at,), (moving,))
    y = bind(o, s)
    terms = []
    if "x" in moving:
        terms.append(bind(_without_bias(o)._replace(x=moving.pop("x")), s))
        at.pop("x")
    if "bias" in moving:  # for which the reference would compute the product
        bias = Operands(x=None, packed=None, bias=moving.pop("bias"), index=o.index)
        zeros = jnp.zeros_like(y, jnp.float32)
        terms.append(_around.after(zeros, bias, s._replace(entry=None), None if o.index is None else o.stack))
        at.pop("bias")
    if moving:
        terms.append(jax.jvp(lambda d: _reference.product(o._replace(**d), s), (at,), (moving,))[1])
    return y, sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(y).to_tangent_aval())


def _transpose(ct, *args, tree, s: Static):
    """With respect to x by the kernel, to any other operand in which the product is linear by the reference."""
    named = tree.unflatten(args).items()
    unknown = {name: a.aval for name, a in named.items() if ad.is_undefined_primal(a)}
    if type(ct) is ad.Zero:
        return [ad.Zero(unknown[name]) if name in unknown else None for name in named]
    curved = ["activation"] if s.activation and unknown.keys() - {"residual"} else []
    curved += ["norm"] if "norm" in named and "x" in unknown else []
    if curved:
        raise ValueError(f"{s.op}: with {' and '.join(curved)} it is not linear in {', '.join(unknown)}")
    if len(factors := unknown.keys() - {"bias", "residual"}) > 1 and factors != {"scale", "offset"}:
        raise ValueError(f"{s.op}: it is not linear in {' and '.join(sorted(factors))} together")
    # Zeros for what is not known: a linear function has the same transpose everywhere.
    o = Operands(**{name: _zeros(unknown[name]) if name in unknown else a for name, a in named.items()})
    cotangents = {}
    if "x" in unknown and not _around.has_parts(o, s):
        cotangents["x"] = _transposed(ct, unknown.pop("x"), _without_bias(o), s)
    if unknown:
        at = {name: getattr(o, name) for name in unknown}
        whole = partial(_around.compose, bind if "x" in unknown else _reference.product)
        cotangents |= jax.vjp(lambda u: whole(o._replace(**u), s), at)[1](ct)[0]
    return [cotangents.get(name) for name in named]


def _without_bias(o: Operands) -> Operands:
    """The rest. If vmap made a stack of the bias alone, the rest has one entry, and each valid index becomes 0."""
    rest = o._replace(bias=None)
    if o.index is None or rest.stack == o.stack:
        return rest
    return rest._replace(index=jnp.where(in_range(o.index, o.stack), 0, np.int32(-1)))


def _zeros(aval) -> Array:
    return jnp.zeros(aval.shape, aval.dtype)


def _transposed(ct, x, o: Operands, s: Static) -> Array:
    """The cotangent of x in the product with the rest of o. x: its aval."""
    k = x.shape[-1] if s.k is None else None
    y = bind(o._replace(x=ct), s._replace(k=k, out_dtype=x.dtype, dtype_before_widening=None))
    if o.index is None:
        return y
    # The NaN that an index out of range gives does not depend on x.
    return select(in_range(o.index, o.stack), y, 0)


ad.primitive_jvps[gemv_p] = _jvp
ad.primitive_transposes[gemv_p] = _transpose


# Lowering, in the way that _ways.py says: on several devices by the partitioner, on one by a kernel or the reference,
# and the parts around the product by themselves unless the kernel takes them.


def _lower(ctx, *args, platform: str | None, tree, s: Static):
    o: Operands = tree.unflatten(ctx.avals_in)
    own, whole, obstacle = auto.meshes(ctx, s)
    match way(platform, obstacle, own is not None, o, s):
        case Way.NARROW_X:
            run = partial(_with_x_as, s.dtype_before_widening)
        case Way.PARTS_AROUND:
            run = partial(_around.compose, bind)
        case Way.FLOAT_X:
            run = partial(_with_x_as, _dispatch.float_x(o))
        case Way.PARTITIONED:
            run = partial(_partitioned, tree=tree, own=own, whole=whole)
        case Way.KERNEL:
            assert platform is not None
            run = partial(_kernel_call, platform=platform)
        case Way.MANY_ROWS:
            run = partial(_many_rows.product, platform=platform)
        case Way.LOOP:
            run = _reference.loop
        case Way.REFERENCE:
            run = _reference.product
    return mlir.lower_fun(lambda *args: run(tree.unflatten(args), s), multiple_results=False)(ctx, *args)


def _with_x_as(dtype, o: Operands, s: Static) -> Array:
    return bind(o._replace(x=o.x.astype(dtype)), s._replace(dtype_before_widening=None))


def _partitioned(o: Operands, s: Static, *, tree, own, whole) -> Array:
    return auto.partitioned(bind, tree, s, own, whole)(*jax.tree.leaves(o))


def _kernel_call(o: Operands, s: Static, *, platform: str) -> Array:
    """The FFI call: x as (B, M, its width), the weight's arrays as stacks, absent ones left out."""
    batch, rows, width = o.batch, o.rows, _width(o, s)
    rounds = _dispatch.rounds(platform, o, s)
    if rounds and s.dtype_before_norm is not None:
        o = o._replace(x=o.x.astype(s.dtype_before_norm))
    o = o._replace(packed=whole_words(o.packed))
    if o.scale is None and o.zero is not None:  # a product of integers
        o = o._replace(zero=o.zero.astype(np.int32))
    given = {name: a if o.index is not None else a[None] for name, a in o.weight().items()}
    if o.residual is not None:
        given["residual"] = o.residual.reshape(batch, rows, width)
    if o.x_scale is not None:
        given["x_scale"] = o.x_scale.reshape(batch, rows, o.x_scale.shape[-1])
    attributes = {"bits": np.int64(s.bits), "group": np.int64(s.group or s.k or o.x.shape[-1])}
    attributes |= {} if s.activation is None else {"activation": s.activation}
    attributes |= {} if o.norm is None else {"eps": np.float32(s.eps)}
    attributes |= {"round_norm": True} if s.round_norm else {}
    attributes |= {"rounded": True} if rounds else {}

    def call(x, index):
        named = Operands(x=x, **given, index=index).items()
        results = [jax.ShapeDtypeStruct((*x.shape[:-1], width), s.out_dtype)]
        if (scratch := _dispatch.scratch(platform, o._replace(x=x, index=index), s)) is not None:
            results.append(scratch)
        f = jax.ffi.ffi_call(TARGET, results)
        return f(*named.values(), operands=",".join(named), transposed=s.k is not None, **attributes)[0]

    x, shape = o.x.reshape(batch, rows, o.x.shape[-1]), (*o.x.shape[:-1], width)
    if o.index is not None and s.entry is not None:
        attributes["entry"] = np.int64(s.entry)
    if o.index is None or s.entry is not None:
        return call(x, None).reshape(shape)
    nbytes = prod(o.packed.shape[1:]) * o.packed.dtype.itemsize
    share = _dispatch.shared_rows(platform, o, s)
    size = _grouped.tile_size(batch, rows, o.stack, nbytes=nbytes, share=share, platform=platform)
    if size > 1 and o.residual is None and o.x_scale is None:
        call = partial(_grouped.in_tiles, call, stack=o.stack, size=size, platform=platform)
    return call(x, o.index.reshape(batch)).reshape(shape)


auto.tell_of_devices(gemv_p)
mlir.register_lowering(gemv_p, partial(_lower, platform=None))
for _platform in backends:
    mlir.register_lowering(gemv_p, partial(_lower, platform=_platform), platform=_platform)
