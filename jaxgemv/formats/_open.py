"""`jaxgemv.formats.open`: which family a path belongs to."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgemv._check import FLOATS, names_of
from jaxgemv.formats import gguf
from jaxgemv.formats._checkpoint import Checkpoint, Options

_OP = "formats.open"


def open(
    path: str | PathLike,
    *,
    scale_dtype: DTypeLike | None = None,
    requantize: Mapping[str, Any] | bool | None = None,
) -> Checkpoint:
    """The tensors of a checkpoint by name: `QuantizedTensor`s, and numpy arrays of what is not quantised.

    - path: a GGUF file.
    - scale_dtype: float16, bfloat16 or float32, for scales and offsets that the file has as products of two numbers
      (Q2_K to Q6_K, say), which only float32 holds exactly. float32 by default.
    - requantize: arguments of `jaxgemv.quantize` for tensors in a format that cannot be represented, which are refused
      otherwise when they are read; True for the defaults.

    The file is mapped, and a tensor is read when it is asked for; see `Checkpoint`. Raises FileNotFoundError, ValueError
    for a file that is damaged or of an unknown kind, with file, tensor, expected and got; TypeError for dtypes; and for a
    tensor that cannot be represented, NotImplementedError.
    """
    if scale_dtype is not None and jnp.dtype(scale_dtype) not in FLOATS:
        raise TypeError(f"{_OP}: scale_dtype must be {names_of(FLOATS)}; got {jnp.dtype(scale_dtype)}")
    if requantize is not None and not isinstance(requantize, Mapping | bool):
        raise TypeError(
            f"{_OP}: requantize must be a dict of quantize's arguments; got {type(requantize).__name__}"
        )
    if isinstance(requantize, bool):
        requantize = {} if requantize else None
    options = Options(None if scale_dtype is None else np.dtype(scale_dtype), requantize)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{_OP}: path must be a checkpoint; there is no {path}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == gguf.MAGIC:
                return gguf.read(path, options)
    raise ValueError(f"{_OP}: {path} must be a GGUF file; got something else")
