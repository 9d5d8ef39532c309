"""What gemv_p takes: arrays by name, and what is known while tracing."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType

from jaxgemv._shapes import known


class Operands(NamedTuple):
    """The arrays of a product, a pytree; None for those there are not. Fields in the order of csrc/operands.h.

    x is (*P, *L, K). Without index, P is empty, and the weight is one matrix: packed (N, words), scale, zero and
    offset (), (N,) or (N, G), codebook (2^b,), global_scale () or (N,), perm and norm (K,), bias (N,). With index,
    int32 (*P), each of these has a leading stack dimension, S or 1, and slice p of x meets entry index[p]. That one
    operand serves layers, experts, and vmap over weights. residual is of the result's shape, x_scale (*P, *L, G).
    """

    x: Any
    packed: Any  # or, in a dense product, the float weight
    scale: Any = None
    zero: Any = None
    offset: Any = None
    codebook: Any = None
    global_scale: Any = None
    perm: Any = None
    x_scale: Any = None
    norm: Any = None
    bias: Any = None
    residual: Any = None
    index: Any = None

    def items(self) -> dict[str, Any]:
        """The arrays that are given, by name."""
        return {name: a for name, a in zip(self._fields, self) if a is not None}

    def weight(self) -> dict[str, Any]:
        """The arrays of which index picks an entry."""
        return {name: a for name, a in self.items().items() if name not in PER_ROW}

    @property
    def prefix(self) -> int:
        """Leading dimensions of x that say which slice it is: those of index."""
        return 0 if self.index is None else self.index.ndim

    @property
    def batch(self) -> int:
        """Slices of x, each with an index of its own."""
        return prod(self.x.shape[: self.prefix])

    @property
    def rows(self) -> int:
        """Rows of a slice, which meet one matrix."""
        return prod(self.x.shape[self.prefix : -1])

    @property
    def known_rows(self) -> int | None:
        """The same, or None where one program is for few rows and for many, under jax.export."""
        return known(self.rows)

    @property
    def many(self) -> bool:
        """Whether rows are known to be more than products keep to float32 for."""
        return self.maybe_many and self.known_rows is not None

    @property
    def maybe_many(self) -> bool:
        """Whether they may be."""
        rows = self.known_rows
        return rows is None or rows > 64  # kExactRows of csrc/gemv.h

    @property
    def stack(self) -> int:
        """With index, the number of entries."""
        return max(a.shape[0] for a in self.weight().values())

    @property
    def is_nothing(self) -> bool:
        """Whether an index has no entry to choose."""
        return self.index is not None and known(self.stack) == 0


# What goes with the rows of x, and not with the weight.
PER_ROW = frozenset({"x", "x_scale", "residual", "index"})

# All that a kernel may or may not take, by the names of csrc/operands.h.
FACTS = (*Operands._fields, "activation", "one_byte_scale")


class Static(NamedTuple):
    """What is known of a product while tracing.

    With k=None it is that with the weight's rows, (*P, *L, N). With k=K it is the transposed one: x is (*P, *L, N),
    and the result (*P, *L, K). Each is the other's transpose.
    """

    op: str  # for messages
    bits: int  # 0: a dense weight
    group: int | None  # codes that share a scale; None for one group a row
    out_dtype: np.dtype
    implementation: str | None = None
    k: int | None = None
    activation: str | None = None
    eps: float = 0.0
    round_norm: bool = False  # what a norm makes of x may be rounded to x's dtype
    precision: str | None = None  # jax.default_matmul_precision at the call, for many rows of float32 x
    dtype_before_norm: np.dtype | None = None  # x's, before a norm made float32 of it
    # x is float32 only so that its cotangent is summed over devices in float32; the product itself takes this dtype.
    dtype_before_widening: np.dtype | None = None
    entry: int | None = None  # what index is, where that is known


def is_explicit(a: Array) -> bool:
    """Whether an array is on a mesh with an Explicit axis, so that its type says how it is cut (but for a dimension
    that vmap runs over)."""
    return AxisType.Explicit in jax.typeof(a).sharding.mesh.axis_types


def in_range(index: Array, stack: int) -> Array:
    """Where an index is that of an entry."""
    return (index >= 0) & (index < stack)


def in_order(perm: Array, k) -> Array:
    """Where an entry of a permutation is that of an element of x; from -K on, as numpy counts."""
    return (perm >= -k) & (perm < k)


def nowhere(dtype) -> Any:
    """What a result of this dtype has where an index or a permutation is out of range."""
    dtype = np.dtype(dtype)
    return dtype.type(np.iinfo(dtype).min if dtype == np.int32 else np.nan)


def select(valid: Array, y: Array, other) -> Array:
    """The slices of y that are valid, and `other` in place of the rest."""
    return jnp.where(
        valid.reshape(*valid.shape, *(1,) * (y.ndim - valid.ndim)), y, np.asarray(other, y.dtype)
    )
