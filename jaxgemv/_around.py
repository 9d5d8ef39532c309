"""The parts around a product: scales, RMSNorm and a permutation of x before it; scales, bias, activation and residual
behind it.

They are one definition for all: the reference, dense weights, and kernels, around which they are composed as long as
these do not fuse them. In float32, and rounded once at the end.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jaxgemv._operands import Operands, Static, in_order, in_range, is_explicit, nowhere, select
from jaxgemv._shapes import any_rank

ACTIVATIONS = {
    "relu": jax.nn.relu,  # keeps NaN
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
}
# For a weight of 2F rows: act(y[..., :F]) * y[..., F:].
GATED = {"swiglu": "silu", "geglu": "gelu"}


def is_gated(activation: str | None) -> bool:
    return activation in GATED


def has_parts(o: Operands, s: Static) -> bool:
    return s.activation is not None or any(
        a is not None for a in (o.norm, o.perm, o.global_scale, o.x_scale, o.residual)
    )


def only_scales(o: Operands, s: Static) -> bool:
    """Whether a global scale is the only part."""
    return o.global_scale is not None and not has_parts(o._replace(global_scale=None), s)


def compose(
    product: Callable[[Operands, Static], Array], o: Operands, s: Static, with_bias: bool = False
) -> Array:
    """The product with its parts, by a `product` that knows none of them, nor the bias if that is a part too."""
    with_bias = with_bias and o.bias is not None
    if not has_parts(o, s) and not with_bias:
        return product(o, s)
    stack = None if o.index is None else o.stack
    o, rest = split(o, with_bias)
    inner = inner_static(o, rest, s)
    x = before(o, s)
    # An integer cannot say that an entry of perm is out of range, as NaN does.
    is_whole = _in_order(o) if o.perm is not None and x.dtype == jnp.int8 else None
    o = inner_operands(o, x)
    if stack is None or o.stack == stack:
        y = product(o, inner)
    else:
        # One matrix and a stack of norms, say, as vmap makes them: all slices of x are rows for the one matrix.
        alone = o._replace(index=None, **{name: a[0] for name, a in o.weight().items()})
        y = select(in_range(o.index, stack), product(alone, inner), nowhere(inner.out_dtype))
    if is_whole is not None:
        y = select(is_whole, y, nowhere(inner.out_dtype))
    return after(y, rest, s, stack)


def inner_call(o: Operands, s: Static) -> tuple[Operands, Static]:
    """What `compose` calls the product with; x is only a shape and a dtype."""
    o, rest = split(o)
    same = (o.norm is None or s.round_norm) and o.x_scale is None
    x = jax.ShapeDtypeStruct(o.x.shape, o.x.dtype if same else jnp.dtype(jnp.float32))
    return inner_operands(o, x), inner_static(o, rest, s)


def inner_operands(o: Operands, x) -> Operands:
    """The product's, from what `split` gives; x: as `before` makes it."""
    return o._replace(x=x, norm=None, perm=None, x_scale=None)


def split(o: Operands, with_bias: bool = False) -> tuple[Operands, Operands]:
    """(x, the weight and what comes before the product; what comes behind it)"""
    behind = dict(global_scale=o.global_scale, residual=o.residual, index=o.index)
    if o.x_scale is not None and o.x_scale.shape[-1] == 1:
        behind["x_scale"] = o.x_scale
    if with_bias or o.global_scale is not None or "x_scale" in behind:  # which do not multiply the bias
        behind["bias"] = o.bias
    rest = Operands(x=None, packed=None)._replace(**behind)
    return o._replace(**{name: None for name in behind if name != "index"}), rest


def inner_static(o: Operands, rest: Operands, s: Static) -> Static:
    """The product's, from what `split` gives."""
    behind = s.activation or rest.items().keys() - {"index"}
    return s._replace(
        activation=None,
        eps=0.0,
        round_norm=False,
        out_dtype=jnp.dtype(jnp.float32) if behind else s.out_dtype,
        dtype_before_norm=s.dtype_before_norm if o.norm is None else s.dtype_before_widening or o.x.dtype,
        dtype_before_widening=s.dtype_before_widening if o.norm is None and o.x_scale is None else None,
    )


@any_rank
def before(o: Operands, s: Static) -> Array:
    """x as the product takes it: scaled by group or normalised, in float32 unless that may be rounded, and in the order
    of the codes."""
    x = o.x
    if o.x_scale is not None:
        groups = x.reshape(*o.x_scale.shape, x.shape[-1] // o.x_scale.shape[-1])
        x = (groups.astype(jnp.float32) * o.x_scale[..., None]).reshape(x.shape)
    if o.norm is not None:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + s.eps)
        x = x * _entry(o.norm, o, x.ndim).astype(jnp.float32)
        x = x.astype(o.x.dtype) if s.round_norm else x
    if o.perm is not None and o.index is None:
        x = jnp.take(x, o.perm, axis=-1, mode="fill")
    elif o.perm is not None:
        perm = jnp.broadcast_to(_entry(o.perm, o, x.ndim), x.shape)
        if is_explicit(perm):  # and x has to be as it is
            x = jnp.where(perm < 0, 0, x)
        x = jnp.take_along_axis(x, perm, axis=-1, mode="fill")
    return x


def _in_order(o: Operands) -> Array:
    """Whether each element of x that perm names is there, for each slice."""
    inside = jnp.all(in_order(o.perm, o.x.shape[-1]), axis=-1)
    return inside if o.index is None else _entry(inside, o, o.prefix + 1)[..., 0]


@any_rank
def after(y: Array, rest: Operands, s: Static, stack: int | None) -> Array:
    """From what the product gives, in float32, to the result. stack: entries that index may choose from."""
    entry = partial(_entry, o=rest, ndim=y.ndim)
    # The product gives NaN for an index out of range. With parts behind it NaN comes last: it would spread to the
    # gradients of the parts' entries that the index is clipped to.
    behind = s.activation or any(rest.items().keys() - {"index"})
    inside = None
    if behind and rest.index is not None and stack is not None and s.entry is None:
        inside = in_range(rest.index, stack)
        y = select(inside, y, 0)
    if rest.x_scale is not None:
        y = y * rest.x_scale
    if rest.global_scale is not None:
        y = y * entry(rest.global_scale).astype(jnp.float32)
    if rest.bias is not None:
        y = y + entry(rest.bias).astype(jnp.float32)
    if s.activation in GATED:
        gate, up = jnp.split(y, 2, axis=-1)
        y = ACTIVATIONS[GATED[s.activation]](gate) * up
    elif s.activation is not None:
        y = ACTIVATIONS[s.activation](y)
    if rest.residual is not None:
        y = y + rest.residual.astype(jnp.float32)
    return (y if inside is None else select(inside, y, np.nan)).astype(s.out_dtype)


def _entry(a: Array, o: Operands, ndim: int) -> Array:
    """A parameter (), (W,), or with index what it picks of a stack of these, to broadcast against (*P, *L, W)."""
    if o.index is None:
        return a
    if a.shape[0] == 0:  # any value will do: an index has no entry to pick
        a = jnp.zeros((1, *a.shape[1:]), a.dtype)
    picked = _at(jnp.asarray(a), jnp.clip(o.index, 0, a.shape[0] - 1))
    last = picked.shape[o.prefix :] or (1,)
    return picked.reshape(*o.index.shape, *(1,) * (ndim - o.prefix - 1), *last)


def _at(a: Array, index: Array) -> Array:
    """a[index]. With Explicit axes JAX must be told how the result is cut, which it ignores for a scalar index."""
    if not is_explicit(index):
        return a[index]
    rows = index if index.ndim else index[None]
    picked = a.at[rows].get(out_sharding=PartitionSpec(*(None,) * (rows.ndim + a.ndim - 1)))
    return picked if index.ndim else picked[0]
