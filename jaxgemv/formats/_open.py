"""`jaxgemv.formats.open`: which kind of file a path is."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jaxgemv._check import FLOATS, as_dtype, names_of
from jaxgemv._formats import resolve
from jaxgemv._tree import check_arguments
from jaxgemv.formats import _families, _safetensors, gguf, gguf_parts, onnx_matmulnbits
from jaxgemv.formats._checkpoint import Checkpoint, Options

_OP = "formats.open"


def open(
    path: str | PathLike,
    *,
    scale_dtype: DTypeLike | None = None,
    requantize: Mapping[str, Any] | bool | None = None,
) -> Checkpoint:
    """The tensors of a checkpoint by name: a `QuantizedTensor` each, or a numpy array of what is not quantised.

    - path: a GGUF, safetensors or ONNX file, or a folder with one, or with safetensors in several and their index.
      Of a GGUF model in several files it is any of them. A config.json beside safetensors is read. In them GPTQ, AWQ,
      compressed-tensors, float8 with scales, ModelOpt's NVFP4, MLX, HQQ, bitsandbytes, gpt-oss and torchao are known,
      and in ONNX MatMulNBits; docs/models.md has the details. A quantised weight has the name that it has in the
      unquantised model.
    - scale_dtype: float16, bfloat16 or float32, for scales and offsets that are float32 otherwise: in the file, or
      because it has them as products of two numbers (Q2_K to Q6_K, say), which only float32 holds exactly.
    - requantize: arguments of `jaxgemv.quantize` for tensors in a format that cannot be represented, which are refused
      otherwise when they are read; True for the defaults.

    The file is mapped, and a tensor is read when it is asked for; see `Checkpoint`. Raises FileNotFoundError,
    ValueError for a file that is damaged or of an unknown kind, with file, tensor, expected and got; TypeError for
    dtypes; and for a tensor that cannot be represented, NotImplementedError.

    >>> import pathlib, tempfile, jax, jaxgemv.formats, numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> w = jaxgemv.quantize(np.ones((64, 128), np.float32), format="fp8")
    >>> tensors = {"up.weight": np.asarray(w.packed), "up.weight_scale": np.asarray(w.scale)[:, None]}
    >>> save_file(tensors | {"norm.weight": np.ones(128, np.float32)}, path)
    >>> checkpoint = jaxgemv.formats.open(path)
    >>> {name: type(checkpoint[name]).__name__ for name in sorted(checkpoint)}
    {'norm.weight': 'ndarray', 'up.weight': 'QuantizedTensor'}
    >>> jaxgemv.gemv(checkpoint["norm.weight"], checkpoint["up.weight"]).shape
    (64,)
    """
    dtype = None if scale_dtype is None else as_dtype(_OP, "scale_dtype", scale_dtype)
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"{_OP}: scale_dtype must be {names_of(FLOATS)}; got {dtype}")
    if requantize is not None and not isinstance(requantize, Mapping | bool):
        raise TypeError(
            f"{_OP}: requantize must be a dict of quantize's arguments; got {type(requantize).__name__}"
        )
    if isinstance(requantize, bool):
        requantize = {} if requantize else None
    if requantize is not None:
        check_arguments(f"{_OP}: requantize's ", requantize)
        given = (requantize.get("format"), requantize.get("bits"), requantize.get("group_size", "default"))
        resolve(f"{_OP}: requantize", *given)
    if requantize and "in_axis" in requantize:
        raise ValueError(
            f"{_OP}: requantize must not have in_axis, since all weights are (N, K); got {requantize}"
        )
    options = Options(dtype, requantize)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{_OP}: path must be a file or a folder of this machine; there is no {path}")
    if path.is_dir():
        files = _safetensors.files_of(path)
        if files:
            return _families.read(files, path, options)
        others = sorted(file for file in path.iterdir() if file.suffix in (".gguf", ".onnx"))
        if len({gguf_parts.whole_of(file) for file in others}) != 1:
            got = ", ".join(file.name for file in others) or "none of them"
            raise ValueError(
                f"{_OP}: {path} must have safetensors files, or one GGUF or ONNX file; got {got}"
            )
        path = others[0]
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == gguf.MAGIC:
        return gguf.read(path, options)
    if path.suffix == ".onnx":
        return onnx_matmulnbits.read(path, options)
    if path.suffix == ".safetensors" or _safetensors.looks_like_it(path):
        return _families.read({path: set()}, path.parent, options)
    raise ValueError(f"{_OP}: {path} must be a GGUF, safetensors or ONNX file; got something else")
