"""Checks of what users pass in. Every message says operation, argument, expected, got."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.export import is_symbolic_dim

from jaxgemv._shapes import known

if TYPE_CHECKING:
    from jaxgemv._tensor import QuantizedTensor

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
ONE_BYTE = (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)  # of scales
FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)  # of weights


def as_array(op: str, name: str, a) -> Array:
    """What has a shape and a dtype as it is (numpy, tracers), the rest through jnp.asarray."""
    if isinstance(a, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{op}: {name} must be an array; got a ShapeDtypeStruct, for which there is jax.eval_shape"
        )
    if all(hasattr(a, of) for of in ("dtype", "shape", "ndim")) and not hasattr(a, "packed"):
        return a  # and no QuantizedTensor, nor the w.T of one
    try:
        if a is not None:
            return jnp.asarray(a)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{op}: {name} must be an array; got {None if a is None else type(a).__name__}")


def as_dtype(op: str, name: str, value) -> np.dtype:
    try:
        return jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be a dtype or the name of one; got {value!r}") from None


def names_of(dtypes) -> str:
    *first, last = (jnp.dtype(d).name for d in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def check_float(op: str, name: str, a, dtypes=FLOATS) -> Array:
    a = as_array(op, name, a)
    if a.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {names_of(dtypes)}; got {a.dtype}")
    return a


def as_index(op: str, index, size: int) -> Array | np.ndarray:
    """An integer or array of them as int32, in which what is out of range stays out of range."""
    index = np.asarray(index) if isinstance(index, int) and not isinstance(index, bool) else index
    index = as_array(op, "index", index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{op}: index must be int32; got {index.dtype}")
    limits = jnp.iinfo(index.dtype)
    size = np.iinfo(np.int32).max if known(size) is None else size
    if limits.bits > 16 and index.dtype != jnp.int32:
        # 2^32 + 1 would become 1.
        inside = (index < size) if limits.min == 0 else (index >= -size) & (index < size)
        where = jnp.where if isinstance(index, Array) else np.where
        index = where(inside, where(inside, index, 0).astype(np.int32), np.iinfo(np.int32).min)
    return index.astype(np.int32)


def words_per_row(k: int, bits: int) -> int:
    """32-bit words that hold k codes."""
    return -(-k * bits // 32)


def check_bits(op: str, bits) -> int:
    """bits as an int, also where numpy has it."""
    if not isinstance(bits, int | np.integer) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise ValueError(f"{op}: bits must be an integer from 1 to 8; got {bits!r}")
    return int(bits)


def check_group_size(op: str, group_size) -> int:
    if not isinstance(group_size, int | np.integer) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"{op}: group_size must be a positive integer or None; got {group_size!r}")
    return int(group_size)


def check_k(op: str, name: str, k) -> int:
    """k as an int; a symbolic size stays one."""
    if is_symbolic_dim(k):
        return k  # pyright: ignore[reportReturnType]
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise ValueError(f"{op}: {name} must be a positive integer; got {k!r}")
    return int(k)


def check_packed(op: str, name: str, packed, bits: int, k: int, why: str) -> None:
    """Raises unless the rows of `packed` hold exactly k codes."""
    if packed.dtype in FLOAT8 and bits == 8:
        width = k
    elif packed.dtype in (jnp.uint32, jnp.uint8):
        width = words_per_row(k, bits) * 4 // packed.dtype.itemsize
    else:
        hint = "; pack codes with jaxgemv.pack" if jnp.issubdtype(packed.dtype, jnp.integer) else ""
        raise TypeError(
            f"{op}: {name} must be uint32, or uint8 with the same bytes{hint}; got {packed.dtype}"
        )
    if packed.ndim < 1 or packed.shape[-1] != width:
        lead = "..." if packed.ndim != 2 else "N"
        raise ValueError(f"{op}: {name} must have shape ({lead}, {width}){why}; got {tuple(packed.shape)}")


def check_weight(
    op: str, w: "QuantizedTensor", k: int, prefix: str = "", why: str | None = None, *, least: int = 2
) -> int | None:
    """Checks the arrays of w against each other and K = k; the group size, or None for one group a row.

    `prefix` is how the caller names the arrays' owner in messages ("w." or ""). least: dimensions of a weight; with 1 a
    single row will do, or no row at all.
    """
    check_bits(op, w.bits)
    if w.k is not None:
        check_k(op, f"{prefix}k", w.k)
    why = f" for K = {k}" if why is None else why
    name = f"{prefix}packed" if prefix else "Wq"
    if w.packed.ndim < least:
        raise ValueError(f"{op}: {name} must have shape (..., N, words); got {tuple(w.packed.shape)}")
    check_packed(op, name, w.packed, w.bits, k, why)
    if w.packed.ndim > 1 and w.packed.shape[-2] == 0 and least > 1:
        raise ValueError(f"{op}: {name} must have at least one row; got {tuple(w.packed.shape)}")
    if w.zero is not None and w.offset is not None:
        raise ValueError(f"{op}: zero and offset exclude each other; got both")
    groups = {}
    for field in ("scale", "zero", "offset"):
        array = getattr(w, field)
        if array is not None:
            groups[field] = _check_parameter(op, prefix + field, array, w)
    if w.packed.dtype in FLOAT8:
        for field in ("zero", "offset", "codebook"):
            if getattr(w, field) is not None:
                raise ValueError(f"{op}: {field} must be None for weights of {w.packed.dtype}; got an array")
    if w.codebook is not None:
        if w.zero is not None or w.offset is not None:
            raise ValueError(f"{op}: codebook excludes zero and offset")
        check_float(op, "codebook", w.codebook)
        _check_stacked(op, "codebook", w.codebook, w, (1 << w.bits,))
    if w.perm is not None:
        if not jnp.issubdtype(w.perm.dtype, jnp.integer):
            raise TypeError(f"{op}: {prefix}perm must be int32; got {w.perm.dtype}")
        _check_stacked(op, f"{prefix}perm", w.perm, w, (k,))
    if w.global_scale is not None:
        check_float(op, f"{prefix}global_scale", w.global_scale)
        _check_stacked(op, f"{prefix}global_scale", w.global_scale, w, (), tuple(w.packed.shape[-2:-1]))
    return _check_groups(op, prefix, groups, w.group_size, k)


def _shape(*sizes) -> str:
    return f"({', '.join(map(str, sizes))}{',' * (len(sizes) == 1)})"


def _check_stacked(op: str, name: str, array, w: "QuantizedTensor", *shapes: tuple[int, ...]) -> None:
    """Raises unless the array has one of these shapes, behind the weight's stack dimensions."""
    lead = tuple(w.packed.shape[:-2])
    allowed = list(dict.fromkeys((*lead, *shape) for shape in shapes))
    if tuple(array.shape) not in allowed:
        each = ", one for each entry of the stack" if lead and tuple(array.shape) in shapes else ""
        expected = " or ".join(_shape(*shape) for shape in allowed)
        raise ValueError(f"{op}: {name} must have shape {expected}{each}; got {tuple(array.shape)}")


def _check_parameter(op: str, name: str, array, w: "QuantizedTensor") -> int:
    """The number of groups in a (..., N, G) array; 0 for one of shape (...,) or (..., N), which suits any group."""
    integer = jnp.issubdtype(array.dtype, jnp.integer)
    allowed = (*FLOATS, *ONE_BYTE) if name.endswith("scale") else FLOATS
    if array.dtype not in allowed and not (integer and name.endswith("zero")):
        text, swapped = names_of(FLOATS), ""
        if name.endswith("zero"):
            text = f"{', '.join(jnp.dtype(d).name for d in FLOATS)} or an integer dtype"
        elif name.endswith("scale") and integer:
            swapped = " (zero and scale may be swapped)"
        elif name.endswith("scale"):
            text += f", {names_of(ONE_BYTE)}"
        raise TypeError(f"{op}: {name} must be {text}; got {array.dtype}{swapped}")
    lead, n = tuple(w.packed.shape[:-2]), tuple(w.packed.shape[-2:-1])
    shape = tuple(array.shape)
    if shape in (lead, (*lead, *n)):
        return 0
    if shape[:-1] == (*lead, *n) and shape[-1] >= 1:
        return shape[-1]
    expected = f"{_shape(*lead)}, {_shape(*lead, *n)} or {_shape(*lead, *n, 'G')}"
    raise ValueError(f"{op}: {name} must have shape {expected}; got {shape}")


def _check_groups(op: str, prefix: str, groups: dict[str, int], group_size, k: int) -> int | None:
    if group_size is not None:
        check_group_size(op, group_size)
    counts = {field: g for field, g in groups.items() if g}
    if not counts:
        return None
    if len(set(counts.values())) > 1:
        raise ValueError(f"{op}: scale, zero and offset must have the same number of groups; got {counts}")
    field, count = next(iter(counts.items()))
    if group_size is None:
        if k % count:
            raise ValueError(
                f"{op}: {prefix}{field} has {count} groups, which do not divide K = {k}: give group_size="
            )
        return k // count
    if count != -(-k // group_size):
        raise ValueError(
            f"{op}: {prefix}{field} must have {-(-k // group_size)} groups for K = {k} and "
            f"group_size = {group_size}; got {count}"
        )
    return group_size
