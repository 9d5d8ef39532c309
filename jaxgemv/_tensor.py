"""`QuantizedTensor`: a weight as codes and what turns them into numbers."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxgemv._check import FLOAT8, ONE_BYTE, as_array, as_dtype, as_index, check_bits, check_k, check_weight
from jaxgemv._format import beside, pack, weights
from jaxgemv._operands import in_order, is_explicit
from jaxgemv._shapes import known

# Arrays of a tensor, in the order of its fields; and those of them that have a part for each row of the weight.
ARRAYS = ("packed", "scale", "zero", "offset", "codebook", "global_scale", "perm")
_BY_ROW = ("packed", "scale", "zero", "offset", "global_scale")
_NO_ARRAY = (
    "QuantizedTensor: x @ w is not there; write x @ w.T, or jaxgemv.gemv(x, w). Rows are w[ids], and where an array is "
    "wanted, w.dequantize() is one"
)


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=("bits", "group_size", "k"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizedTensor:
    """A weight of shape (..., N, K) stored as b-bit codes; a pytree, so it scans, stacks and shards.

    `w[n, k] = (q[n, k] - zero[n, k // g]) * scale[n, k // g]`, or `q * scale + offset`, or `codebook[q] * scale`, or,
    where `packed` is of a float8 dtype, `packed * scale`.
    Leading dimensions are stacks (layers, experts), and every array leads with them.

    - packed: uint32 (..., N, ceil(K b / 32)), or uint8 with the same bytes. Or float8_e4m3fn or float8_e5m2
      (..., N, K); bits may then be left out.
    - scale: float16, bfloat16, float32, float8_e4m3fn or float8_e8m0fnu; (...,), (..., N) or (..., N, G) with
      G = ceil(K / g). None only for exact integer products.
    - zero: float16, bfloat16 or float32, shaped like scale, or an integer array; None means the mid code 2^(b-1),
      unless `offset` or `codebook` is given.
    - offset: like zero, instead of it, floats only. codebook: (..., 2^b) float, instead of both.
    - global_scale: float (...,) or (..., N), multiplies every weight.
    - perm: int32 (..., K): code k of a row multiplies `x[..., perm[k]]`.
    - group_size: g, needed only when G g != K. k: K, needed only when the last word is not full.

    `w[i]`, with an integer, a slice or an integer array, is an entry of a stack, or rows of an (N, K) matrix. `x @ w.T`
    is `jaxgemv.gemv(x, w)`. A leaf may be an array, a tracer, a numpy array or a `jax.ShapeDtypeStruct`; they are
    checked where they are used, which raises TypeError for dtypes and ValueError for shapes and values.

    >>> import jax.numpy as jnp, jaxgemv
    >>> w = jaxgemv.QuantizedTensor(packed=jnp.array([[0x76543210]], jnp.uint32), scale=jnp.ones(1), bits=4)
    >>> w.shape, w.dtype, w.nbytes
    ((1, 8), dtype('float32'), 8)
    >>> w.dequantize()
    Array([[-8., -7., -6., -5., -4., -3., -2., -1.]], dtype=float32)
    >>> jnp.ones(8) @ w.T
    Array([-36.], dtype=float32)
    """

    packed: Array | np.ndarray
    scale: Array | np.ndarray | None
    zero: Array | np.ndarray | None = None
    offset: Array | np.ndarray | None = None
    codebook: Array | np.ndarray | None = None
    global_scale: Array | np.ndarray | None = None
    perm: Array | np.ndarray | None = None
    bits: int = None  # pyright: ignore[reportAssignmentType]  only of a float8 packed, for which it becomes 8
    group_size: int | None = None
    k: int | None = None

    def __post_init__(self):
        if self.bits is None and getattr(self.packed, "dtype", None) in FLOAT8:
            object.__setattr__(self, "bits", 8)
        for name in ("bits", "group_size", "k"):  # programs are found by them, and exported with them
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))

    __array_ufunc__ = None  # so that numpy's `x @ w.T` asks us

    def __repr__(self) -> str:
        """Its shape, and those of its arrays: their numbers would be pages."""
        fields = {}
        with suppress(AttributeError, IndexError, TypeError, ValueError):  # of fields that are no weight's
            fields["shape"] = self.shape
        fields |= {name: getattr(self, name) for name in ("bits", "group_size", "k", *ARRAYS)}
        given = {name: _brief(value) for name, value in fields.items() if value is not None}
        return f"QuantizedTensor({', '.join(f'{name}={text}' for name, text in given.items())})"

    def __array__(self, *_args, **_kwargs) -> NoReturn:
        raise TypeError("QuantizedTensor: w is no array; w.dequantize() is one, and x @ w.T is the product")

    def __jax_array__(self) -> NoReturn:
        raise TypeError(_NO_ARRAY)

    @classmethod
    def from_codes(
        cls,
        codes: ArrayLike,
        scale: ArrayLike | None,
        *,
        zero: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        codebook: ArrayLike | None = None,
        global_scale: ArrayLike | None = None,
        perm: ArrayLike | None = None,
        bits: int,
        group_size: int | None = None,
    ) -> "QuantizedTensor":
        """From codes (..., N, K), as `jaxgemv.pack` takes them, and the arrays above.

        group_size: needed when G does not divide K, as above. Raises TypeError for dtypes, ValueError for shapes and
        for codes out of range.

        >>> import jax.numpy as jnp, jaxgemv
        >>> codes = jnp.array([[0, 1, 2, 3], [3, 2, 1, 0]])
        >>> w = jaxgemv.QuantizedTensor.from_codes(codes, jnp.array([1.0, 0.5]), offset=jnp.ones(2), bits=2)
        >>> w.dequantize()
        Array([[1. , 2. , 3. , 4. ],
               [2.5, 2. , 1.5, 1. ]], dtype=float32)
        """
        op = "QuantizedTensor.from_codes"
        bits = check_bits(op, bits)
        codes = as_array(op, "codes", codes)
        if codes.ndim < 2:
            raise ValueError(f"{op}: codes must have shape (..., N, K); got {tuple(codes.shape)}")
        arrays = {
            "scale": scale,
            "zero": zero,
            "offset": offset,
            "codebook": codebook,
            "global_scale": global_scale,
            "perm": perm,
        }
        arrays = {name: None if a is None else as_array(op, name, a) for name, a in arrays.items()}
        k = codes.shape[-1]
        w = cls(
            packed=pack(codes, bits),
            **arrays,
            bits=bits,
            group_size=group_size,
            k=k if k * bits % 32 else None,
        )
        group = check_weight(op, w, k)
        return dataclasses.replace(w, group_size=group if group and k % group else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K)"""
        bits = check_bits("QuantizedTensor", self.bits)
        if len(self.packed.shape) == 0:
            raise ValueError("QuantizedTensor: packed must have shape (..., N, words); got ()")
        size = self.packed.shape[-1] * np.dtype(self.packed.dtype).itemsize
        k = size * 8 // bits if self.k is None else check_k("QuantizedTensor", "k", self.k)
        return (*self.packed.shape[:-1], k)

    @property
    def ndim(self) -> int:
        """2 for a matrix, more for a stack."""
        return self.packed.ndim

    @property
    def dtype(self) -> np.dtype:
        """What `dequantize` gives by default: the dtype of the scale, or float32 where that has one byte."""
        dtype = np.dtype((self.packed if self.scale is None else self.scale).dtype)
        return np.dtype(np.float32) if dtype in ONE_BYTE else dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together: what a gemv reads."""
        leaves = jax.tree.leaves(self)
        return sum(prod(a.shape) * np.dtype(a.dtype).itemsize for a in leaves)

    @property
    def T(self) -> "Transposed":
        """For `x @ w.T`, which is `jaxgemv.gemv(x, w)`, and nothing else."""
        return Transposed(self)

    def __matmul__(self, other):
        raise TypeError("QuantizedTensor: w @ x is not there; write x @ w.T, or jaxgemv.gemv(x, w)")

    def __rmatmul__(self, other):
        raise TypeError(_NO_ARRAY)

    def __getitem__(self, i) -> "QuantizedTensor":
        """Entries of the leading dimension: of a stack, or rows of a matrix. By an integer array: `(*i.shape, ...)`.

        An index out of range raises IndexError, or while tracing gives NaN weights; one of another type TypeError.
        `w[...]` is w, as Flax NNX's variables are read.

        >>> import jax.numpy as jnp, jaxgemv
        >>> stack = jaxgemv.quantize(jnp.ones((3, 8, 128)))
        >>> stack[0].shape, stack[1:].shape, stack[0][jnp.array([2, 7])].shape
        ((8, 128), (2, 8, 128), (2, 128))
        """
        if i is Ellipsis:
            return self
        size = self.packed.shape[0]
        if not isinstance(i, slice):
            i = _checked(i, size)
        arrays = {name: a for name in ARRAYS if (a := getattr(self, name)) is not None}
        if self.ndim > 2:
            return dataclasses.replace(self, **{name: _take(a, i) for name, a in arrays.items()})
        if self.ndim < 2:
            raise ValueError(f"QuantizedTensor: a single row cannot be indexed; got shape {self.shape}")
        # Rows: what they share stays as it is, or is repeated where they become a stack.
        lead = () if isinstance(i, slice) else i.shape[:-1]
        for name, a in arrays.items():
            if name == "scale" and a.ndim == 0:  # so that an index out of range shows in it
                a = _broadcast(a, (size,))
            if name in _BY_ROW and a.ndim:
                arrays[name] = _take(a, i)
            elif lead:
                arrays[name] = _broadcast(a, (*lead, *a.shape))
        return dataclasses.replace(self, **arrays)

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """`jaxgemv.dequantize` of this weight."""
        return dequantize(self, dtype)


# So that jax.export can save a program that takes one.
jax.export.register_pytree_node_serialization(
    QuantizedTensor,
    serialized_name="jaxgemv.QuantizedTensor",
    serialize_auxdata=lambda fields: json.dumps(fields).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


class Transposed:
    """`w.T`: the right side of `x @ w.T`."""

    __array_ufunc__ = None
    # What `x @ w.T` calls. `_ops` sets it, since imports go one way.
    gemv: Callable[[Any, QuantizedTensor], Array]

    def __init__(self, w: QuantizedTensor):
        self.T = w

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, n, k = self.T.shape
        return (*lead, k, n)

    @property
    def dtype(self) -> np.dtype:
        return self.T.dtype

    def __repr__(self) -> str:
        return f"w.T, for x @ w.T alone, of {self.T!r}"

    def __rmatmul__(self, x: ArrayLike) -> Array:
        return Transposed.gemv(x, self.T)

    def __matmul__(self, other):
        self.__array__()

    def __array__(self, *_args, **_kwargs) -> NoReturn:
        raise TypeError(
            "QuantizedTensor: w.T can only be the right side of x @ w.T; w.dequantize().T is an array"
        )


def _checked(i, size: int):
    """An integer or integer array, in range as far as that can be seen."""
    op = "QuantizedTensor"
    if isinstance(i, bool | tuple | str | float) or i is None or i is Ellipsis:
        raise TypeError(f"{op}: index must be an integer, a slice or an integer array; got {i!r}")
    given, i = i, as_index(op, i, size)
    if known(size) is None:
        return i
    if not isinstance(i, Tracer) and not ((np.asarray(i) >= -size) & (np.asarray(i) < size)).all():
        raise IndexError(f"{op}: index must lie in [{-size}, {size}); got {np.asarray(given)}")
    return i


def _broadcast(a, shape: tuple[int, ...]):
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, a.dtype)
    return jnp.broadcast_to(a, shape)


def _take(a, i):
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda a: _take(a, i), a)
    if isinstance(i, slice) or (isinstance(a, np.ndarray) and not isinstance(i, Array)):
        return a[i]
    return jnp.asarray(a).at[i].get(mode="fill")


def _brief(value) -> str:
    """An array as JAX's types are written, uint32[64,32]; anything else as it is."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)


def dequantize(w: QuantizedTensor, dtype: DTypeLike | None = None) -> Array:
    """The float weight (..., N, K) in x's order, computed in float32, rounded once to `dtype` (default: `w.dtype`).

    Raises TypeError for dtypes, and where w has no scale; ValueError for shapes and values.

    >>> import jax.numpy as jnp, jaxgemv
    >>> codes = jnp.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    >>> w = jaxgemv.QuantizedTensor.from_codes(codes, jnp.array([1.0, 0.5]), bits=2)
    >>> jaxgemv.dequantize(w, jnp.bfloat16)
    Array([[-2, -1, 0, 1],
           [0.5, 0, -0.5, -1]], dtype=bfloat16)
    """
    if not isinstance(w, QuantizedTensor):
        raise TypeError(f"dequantize: w must be a QuantizedTensor; got {type(w).__name__}")
    if w.scale is None:
        raise TypeError("dequantize: w.scale must be an array; got None")
    given = {name: a for name in ARRAYS if (a := getattr(w, name)) is not None or name == "packed"}
    w = dataclasses.replace(w, **{name: as_array("dequantize", f"w.{name}", a) for name, a in given.items()})
    check_bits("dequantize", w.bits)
    k = w.shape[-1]
    group = check_weight("dequantize", w, k, "w.", least=1)
    dtype = w.dtype if dtype is None else as_dtype("dequantize", "dtype", dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dequantize: dtype must be a float dtype; got {dtype}")
    arrays = {name: getattr(w, name) for name in ARRAYS}
    if w.perm is not None:
        arrays["perm"] = as_index("dequantize", w.perm, k)
    return _dequantized(arrays, bits=w.bits, group=group, k=k, dtype=dtype)


# Jitted, or scales would become (N, K) arrays.
@partial(jax.jit, static_argnames=("bits", "group", "k", "dtype"), inline=True)
def _dequantized(arrays: dict[str, Array | None], *, bits, group, k, dtype) -> Array:
    perm = arrays.pop("perm")
    # Arrays of one-byte floats have no derivative, as in products.
    arrays = {
        n: lax.stop_gradient(a) if a is not None and a.dtype.itemsize == 1 else a for n, a in arrays.items()
    }
    weight = weights(**arrays, bits=bits, group=group, k=k)
    return (weight if perm is None else _in_order(weight, perm)).astype(dtype)


def _in_order(weight: Array, perm: Array) -> Array:
    """Column k of the codes goes to column perm[k]; those that go to the same one add up, as their products do."""
    cut = jax.typeof(weight).sharding
    perm = beside(perm, weight) if is_explicit(weight) else perm
    if perm.ndim > 1:
        return jax.vmap(_in_order)(weight, perm)
    none = jnp.where(jnp.all(in_order(perm, weight.shape[-1])), 0, jnp.nan).astype(weight.dtype)
    if not is_explicit(weight):
        return jnp.full_like(weight, none).at[..., perm].add(weight, mode="drop")
    whole = NamedSharding(cut.mesh, PartitionSpec(*cut.spec[:-1], None))  # along K
    weight = jax.sharding.reshard(weight, whole)
    moved = jnp.full_like(weight, none).at[..., perm].add(weight, mode="drop", out_sharding=whole)
    return jax.sharding.reshard(moved, cut)
