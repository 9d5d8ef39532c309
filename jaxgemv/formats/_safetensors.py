"""safetensors files as numpy views: https://huggingface.co/docs/safetensors

Eight bytes with the length of the header, the header in JSON, and the tensors one after another. What the header states
is compared with the file before anything is made of it.
"""

import json
import mmap
import re
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from jaxgemv.formats._checkpoint import Entry

_DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # of those that are no whole bytes, of which numpy has no views
_LONGEST_HEADER = 100_000_000  # the library's limit
_MOST_DIMENSIONS = 32


class File(NamedTuple):
    tensors: dict[str, np.ndarray]  # views of the mapped file
    refused: dict[str, Entry]  # those of dtypes that have no view
    metadata: dict[str, str]


def error(path: Path, what: str, expected, got) -> ValueError:
    return ValueError(f"formats.open: {path}: {what} must be {expected}; got {got}")


def looks_like_it(path: Path) -> bool:
    """Whether the header begins as JSON does."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def read_file(path: Path) -> File:
    if path.stat().st_size < 8:
        raise error(path, "the file", "at least 8 bytes long", path.stat().st_size)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    everything = np.frombuffer(memory, np.uint8)
    length = int(everything[:8].view("<u8")[0])
    if length > min(len(everything) - 8, _LONGEST_HEADER):
        raise error(path, "the length of the header", f"at most {len(everything) - 8}", length)
    header = _json_object(path, "the header", everything[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict):
        raise error(path, "__metadata__", "an object", type(metadata).__name__)
    data = everything[8 + length :]
    found = {name: _tensor(path, name, info, data) for name, info in header.items()}
    end = 0
    for first, last, name in sorted((*info["data_offsets"], name) for name, info in header.items()):
        if first < end:
            raise error(path, f"data_offsets of tensor {name}", f"{end} or more", first)
        end = last
    tensors = {name: a for name, a in found.items() if isinstance(a, np.ndarray)}
    return File(tensors, {name: a for name, a in found.items() if isinstance(a, Entry)}, metadata)


def _tensor(path: Path, name: str, info: Any, data: np.ndarray) -> np.ndarray | Entry:
    what = f"tensor {name}"
    if not isinstance(info, dict) or not info.keys() >= {"dtype", "shape", "data_offsets"}:
        raise error(path, what, "an object with dtype, shape and data_offsets", _short(info))
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str) or (kind not in _DTYPES and kind not in _BITS):
        raise error(path, f"the dtype of {what}", f"one of {', '.join(_DTYPES | _BITS)}", _short(kind))
    if not _sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise error(path, f"the shape of {what}", f"at most {_MOST_DIMENSIONS} sizes", _short(shape))
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= len(data):
        raise error(path, f"data_offsets of {what}", f"two, within {len(data)} bytes", _short(offsets))
    dtype = _DTYPES.get(kind)
    nbytes = prod(shape) * dtype.itemsize if dtype else -(-prod(shape) * _BITS[kind] // 8)
    if offsets[1] - offsets[0] != nbytes:
        raise error(path, what, f"{nbytes} bytes for {kind} {_short(shape)}", offsets[1] - offsets[0])
    if nbytes == 0 and prod(max(size, 1) for size in shape) >= 1 << 40:  # which numpy would not make
        raise error(path, f"the shape of {what}", "less than 2^40 without its zeros", _short(shape))
    if dtype is None:
        return Entry(tuple(shape), kind, nbytes, partial(_refuse, path, what, kind))
    return data[offsets[0] : offsets[1]].view(dtype).reshape(shape)


def _refuse(path: Path, what: str, kind: str) -> NoReturn:
    raise NotImplementedError(f"formats.open: {path}: {what} is of dtype {kind}, of which numpy has no array")


def _sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _json_object(path: Path, what: str, text: bytes) -> dict[str, Any]:
    def unique(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name that occurs twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:  # also text that is not UTF-8
        raise error(path, what, "a JSON object", _short(str(problem))) from None
    if not isinstance(found, dict):
        raise error(path, what, "a JSON object", type(found).__name__)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no such file."""
    return _json_object(path, "the file", path.read_bytes()) if path.is_file() else {}


_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


def _need_parts(path: Path, name: str, count: int) -> None:
    for i in range(1, count + 1):
        part = path / f"{name}-{i:05}-of-{count:05}.safetensors"
        if not part.is_file():
            raise FileNotFoundError(
                f"formats.open: {path} must have all {count} parts of {name}; there is no {part.name}"
            )


def files_of(path: Path) -> dict[Path, set[str]]:
    """The files that hold a folder's tensors, and names that each must have: as its index says, or else all files."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        alone = [file for file in sorted(path.glob("*.safetensors")) if file.is_file()]
        for name, count in sorted({part.groups() for file in alone if (part := _PART.fullmatch(file.name))}):
            _need_parts(path, name, int(count))
        return {file: set() for file in alone}
    index = path / "model.safetensors.index.json"
    index = index if index in indexes else indexes[0]
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise error(index, "weight_map", "an object of file names", _short(weights))
    files: dict[Path, set[str]] = {}
    for tensor, name in weights.items():
        if Path(name).name != name or not (path / name).is_file():
            raise error(index, "weight_map", "of files in its folder", _short(name))
        files.setdefault(path / name, set()).add(tensor)
    return files


def read_files(files: Mapping[Path, set[str]]) -> tuple[File, dict[str, Path]]:
    """All files as one, and where each tensor is."""
    whole, places = File({}, {}, {}), {}
    for path, expected in files.items():
        file = read_file(path)
        names = file.tensors.keys() | file.refused.keys()
        for name in expected - names:
            raise error(path, f"tensor {name}", "in it, as the index says", "none")
        for name in names & places.keys():
            raise error(path, f"tensor {name}", "in one file", f"another one in {places[name].name}")
        places |= dict.fromkeys(names, path)
        whole.tensors.update(file.tensors)
        whole.refused.update(file.refused)
        whole.metadata.update(file.metadata)
    return whole, places


def quantization_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the codes, wherever the family keeps that; empty where nothing is."""
    for holder in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(holder, Mapping) and isinstance(holder.get(key), dict):
                return holder[key]
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        found = read_json(folder / name)
        if found:
            inner = found.get("quantization")  # ModelOpt's
            return inner if isinstance(inner, dict) else found
    return {}
