"""The formats that `quantize` knows by name: one table, from which its checks and the docs are made."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgemv import codebooks
from jaxgemv._check import FLOATS, as_dtype, check_bits, check_group_size, names_of

# "default" tells a group_size that was not given from None, one group a row.
GroupSize = int | None | Literal["default"]


class Format(NamedTuple):
    """What `format=` decides. codebook: its name in `jaxgemv.codebooks`; None where codes are float8_e4m3fn."""

    codebook: str | None
    group_size: int | None
    scale_dtype: Any = None  # None: of 16 or 32 bits, as scale_dtype= says
    any_group: bool = False  # group_size may be another
    global_scale: bool = False
    who: str = ""  # uses it

    @property
    def bits(self) -> int:
        return 4 if self.codebook else 8

    @property
    def values(self) -> np.ndarray:
        return getattr(codebooks, self.codebook or "E4M3")


FORMATS = {
    "nf4": Format("NF4", 64, who="bitsandbytes, QLoRA"),
    "fp4": Format("FP4", 64, who="bitsandbytes"),
    "mxfp4": Format("E2M1", 32, jnp.float8_e8m0fnu, who="OCP MX, gpt-oss"),
    "nvfp4": Format("E2M1", 16, jnp.float8_e4m3fn, global_scale=True, who="NVIDIA"),
    "iq4_nl": Format("IQ4_NL", 32, who="llama.cpp"),
    "fp8": Format(None, None, any_group=True, who="vLLM, compressed-tensors"),
    "mxfp8": Format(None, 32, jnp.float8_e8m0fnu, who="OCP MX"),
}
METHODS = ("mse", "minmax")


def resolve(op: str, format: str | None, bits: int | None, group_size: GroupSize) -> tuple[int, int | None]:
    """Bits and group size as they are given, or as the format or the defaults of `quantize` have them."""
    if bits is not None:
        bits = check_bits(op, bits)
    if group_size is not None and group_size != "default":
        group_size = check_group_size(op, group_size)
    if format is None:
        return 4 if bits is None else bits, 128 if group_size == "default" else group_size
    known = _known(op, format)
    if bits not in (None, known.bits):
        raise ValueError(f"{op}: bits must be {known.bits} for format={format!r}; got {bits}")
    if group_size == "default":
        return known.bits, known.group_size
    if group_size != known.group_size and not known.any_group:
        raise ValueError(
            f"{op}: group_size must be {known.group_size} for format={format!r}; got {group_size}"
        )
    return known.bits, group_size


def resolve_scale_dtype(op: str, format: str | None, scale_dtype: DTypeLike | None, weight_dtype) -> np.dtype:
    fixed = None if format is None else FORMATS[format].scale_dtype
    given = None if scale_dtype is None else as_dtype(op, "scale_dtype", scale_dtype)
    if fixed is not None:
        if given is not None and given != fixed:
            name = jnp.dtype(fixed).name
            raise TypeError(f"{op}: scale_dtype must be {name} for format={format!r}; got {given}")
        return jnp.dtype(fixed)
    if given is None:
        return jnp.dtype(weight_dtype if weight_dtype in FLOATS else jnp.float32)
    if given not in FLOATS:
        raise TypeError(f"{op}: scale_dtype must be {names_of(FLOATS)}; got {given}")
    return given


def _known(op: str, format: str) -> Format:
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{op}: format must be None or one of {', '.join(FORMATS)}; got {format!r}")
    return FORMATS[format]
