"""Checks of what users pass in. Every message says operation, argument, expected, got."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxgemv._format import QuantizedTensor

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)


def as_array(op: str, name: str, a) -> Array:
    """What has a shape and a dtype as it is (numpy, tracers, ShapeDtypeStructs), the rest through jnp.asarray."""
    if hasattr(a, "dtype") and hasattr(a, "shape"):
        return a
    try:
        return jnp.asarray(a)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an array; got {type(a).__name__}") from None


def words_per_row(k: int, bits: int) -> int:
    """32-bit words that hold k codes."""
    return -(-k * bits // 32)


def check_bits(op: str, bits: int) -> None:
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise ValueError(f"{op}: bits must be an integer from 1 to 8; got {bits!r}")


def check_group_size(op: str, group_size) -> None:
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"{op}: group_size must be a positive integer or None; got {group_size!r}")


def check_packed(op: str, name: str, packed, bits: int, k: int, why: str) -> None:
    """Raises unless the rows of `packed` hold exactly k codes."""
    if packed.dtype not in (jnp.uint32, jnp.uint8):
        hint = "; pack codes with jaxgemv.pack" if jnp.issubdtype(packed.dtype, jnp.integer) else ""
        raise TypeError(
            f"{op}: {name} must be uint32, or uint8 with the same bytes{hint}; got {packed.dtype}"
        )
    width = words_per_row(k, bits) * 4 // packed.dtype.itemsize
    if packed.ndim < 1 or packed.shape[-1] != width:
        lead = "..." if packed.ndim != 2 else "N"
        raise ValueError(f"{op}: {name} must have shape ({lead}, {width}){why}; got {tuple(packed.shape)}")


def check_weight(
    op: str, w: "QuantizedTensor", k: int, prefix: str = "", why: str | None = None
) -> int | None:
    """Checks the arrays of w against each other and K = k; the group size, or None for one group a row.

    `prefix` is how the caller names the arrays' owner in messages ("w." or "").
    """
    check_bits(op, w.bits)
    why = f" for K = {k}" if why is None else why
    name = f"{prefix}packed" if prefix else "Wq"
    if w.packed.ndim < 2:
        raise ValueError(f"{op}: {name} must have shape (..., N, words); got {tuple(w.packed.shape)}")
    check_packed(op, name, w.packed, w.bits, k, why)
    if w.packed.shape[-2] == 0:
        raise ValueError(f"{op}: {name} must have at least one row; got {tuple(w.packed.shape)}")
    if w.zero is not None and w.offset is not None:
        raise ValueError(f"{op}: zero and offset exclude each other; got both")
    groups = {}
    for field in ("scale", "zero", "offset"):
        array = getattr(w, field)
        if array is not None:
            groups[field] = _check_parameter(op, prefix + field, array, w, field == "zero")
    if w.codebook is not None:
        if w.zero is not None or w.offset is not None:
            raise ValueError(f"{op}: codebook excludes zero and offset")
        if w.codebook.dtype not in FLOATS:
            raise TypeError(f"{op}: codebook must be float16, bfloat16 or float32; got {w.codebook.dtype}")
        if w.codebook.ndim < 1 or w.codebook.shape[-1] != 1 << w.bits:
            raise ValueError(
                f"{op}: codebook must have shape ({1 << w.bits},); got {tuple(w.codebook.shape)}"
            )
    return _check_groups(op, prefix, groups, w.group_size, k)


def _check_parameter(op: str, name: str, array, w: "QuantizedTensor", integers: bool) -> int:
    """The number of groups in a (..., N, G) array; 0 for one of shape (...,) or (..., N), which suits any group."""
    integer = jnp.issubdtype(array.dtype, jnp.integer)
    if array.dtype not in FLOATS and not (integers and integer):
        swapped = " (zero and scale may be swapped)" if integer and name.endswith("scale") else ""
        allowed = (
            "float16, bfloat16, float32 or an integer dtype" if integers else "float16, bfloat16 or float32"
        )
        raise TypeError(f"{op}: {name} must be {allowed}; got {array.dtype}{swapped}")
    lead, n = tuple(w.packed.shape[:-2]), w.packed.shape[-2]
    shape = tuple(array.shape)
    if shape in (lead, (*lead, n)):
        return 0
    if shape[:-1] == (*lead, n) and shape[-1] >= 1:
        return shape[-1]
    text = ", ".join(str(s) for s in lead)
    comma = text + ", " if text else ""
    one = f"({text},)" if len(lead) == 1 else f"({text})"
    row = f"({comma}{n})" if lead else f"({n},)"
    raise ValueError(f"{op}: {name} must have shape {one}, {row} or ({comma}{n}, G); got {shape}")


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
