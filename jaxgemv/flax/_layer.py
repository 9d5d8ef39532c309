"""What the layers of both APIs share: arguments they refuse, the weight from its arrays, Flax's dtypes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype
from jax import Array, lax

from jaxgemv import QuantizedTensor
from jaxgemv._check import FLOAT8, ONE_BYTE
from jaxgemv._quantize import static


def check_precision(op: str, precision) -> None:
    """Products accumulate in float32 always, so only the precisions that ask for no more or less will do."""
    for one in precision if isinstance(precision, tuple) else (precision,):
        try:
            known = one is None or lax.Precision(one) in (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{op}: precision must be None, DEFAULT or HIGHEST; got {precision!r}")


def check_default(op: str, name: str, value, default) -> None:
    """Refuses a hook that would see a kernel of floats, which is never made."""
    if value is not default:
        expected = "None" if default is None else f"the default, {default.__name__}"
        raise ValueError(
            f"{op}: {name} must be {expected}: there is no float kernel to call it with; got {value!r}"
        )


def check_type(op: str, name: str, layer, kind: type) -> None:
    """Refuses what does not compute what `kind` does, which a subclass may not."""
    if not isinstance(layer, kind) or type(layer).__call__ is not kind.__call__:
        library = kind.__module__.split(".")[1]
        raise TypeError(f"{op}: {name} must be a flax.{library}.{kind.__name__}; got {type(layer).__name__}")


def weight(arrays: Mapping, *, bits: int, group_size: int | None, k: int) -> QuantizedTensor:
    """The tensor of `quantize(..., bits=bits, group_size=group_size)`, or of a format with these, from its arrays."""
    is_float8 = arrays["packed"].dtype in FLOAT8
    return QuantizedTensor(**arrays, **static(bits, group_size, k, is_float8=is_float8))


def names_of_array(names: tuple, array: str, ndim: int) -> tuple:
    """The axis names of a (..., N, K) weight for one of its arrays."""
    if array == "codebook":
        return (*names[:-2], None)
    return names[:ndim]


def promoted(inputs, w: QuantizedTensor, bias, *, dtype, out_dtype=None) -> tuple[Array, Any]:
    """inputs in Flax's computation dtype, in which w counts as an array of its scale's dtype, and the result's dtype.

    A scale of one byte does not count: nobody wants results of that type.
    """
    scale = None if w.scale is None or w.scale.dtype in ONE_BYTE else w.scale
    dtype = canonicalize_dtype(inputs, scale, bias, dtype=dtype)
    if out_dtype is not None and bias is not None:
        out_dtype = jnp.promote_types(out_dtype, dtype)
    return jnp.asarray(inputs, dtype), out_dtype or dtype


def in_boxes(box, arrays: dict[str, Array], reorder: Callable[[tuple, int], tuple]) -> dict[str, Any]:
    """The arrays of a weight, in boxes if its kernel comes in one. reorder: a kernel's axis names to (..., N, K)."""
    if not isinstance(box, nn.meta.AxisMetadata):
        return arrays
    if not isinstance(box, nn.Partitioned):
        raise TypeError(
            f"jaxgemv.flax: the kernel's metadata must be nn.Partitioned; got {type(box).__name__}"
        )
    ndim = jnp.ndim(box.value)
    names = reorder((*box.names, *(None,) * (ndim - len(box.names))), ndim)
    return {
        name: box.replace(value=a, names=names_of_array(names, name, a.ndim)) for name, a in arrays.items()
    }
