"""GGUF: llama.cpp's files. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Every length that the file states is compared with what is left of it before anything is made of it.
"""

import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats import gguf_parts
from jaxgemv.formats._checkpoint import Checkpoint, Entry, Options, converted
from jaxgemv.formats.gguf_parts import error
from jaxgemv.formats.gguf_types import PLAIN, TYPES, UNREAD, UNREPRESENTABLE, BlockType

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? <u8 <i8 <f8".split())
)
_DEEPEST = 4  # arrays of arrays


class _Info(NamedTuple):
    """A tensor as the file lists it. shape: (..., N, K), which the file has the other way round."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def read(path: Path, options: Options) -> Checkpoint:
    """path: the file, or any part of a model in several."""
    first = _read_file(path, options)
    paths = gguf_parts.parts_of(path, first[0])
    files = [first if part == path else _read_file(part, options) for part in paths]
    if len(files) > 1:
        gguf_parts.check(dict(zip(paths, files, strict=True)))
    metadata = files[0][0]
    entries = {name: entry for _, of_file in files for name, entry in of_file.items()}
    for name, entry in list(entries.items()):  # NVFP4's second scale
        key = f"{name.removesuffix('.weight')}.scale"
        if entry.format == "NVFP4" and key in entries:
            scale, stack = entries[key], entry.shape[:-2]
            if scale.format != "F32" or prod(scale.shape) not in (1, prod(stack)):
                expected = f"F32, one or one for each of {stack}"
                raise error(path, f"tensor {key}", expected, f"{scale.format} {scale.shape}")
            entries[name] = entry._replace(load=partial(_with_global_scale, entry.load, scale.load))
    architecture = metadata.get("general.architecture")
    prefix = f"{architecture}."
    config = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Checkpoint(entries, {"architecture": architecture, **config}, metadata)


def _read_file(path: Path, options: Options) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Its keys and its tensors."""
    with path.open("rb") as file:
        if not file.read(1):
            raise error(path, "the magic", MAGIC, "an empty file")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(path, memory)
    version, tensors, keys = reader.header()
    metadata = {"version": version}
    for _ in range(keys):
        key = reader.string("a key")
        if key in metadata:
            raise reader.error(f"key {key}", "there once", "two")
        metadata[key] = reader.value(f"key {key}")
    infos = [reader.info() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.error("general.alignment", "a positive integer", alignment)
    start = -(-reader.at // alignment) * alignment
    entries = {}
    for info in infos:
        if info.name in entries:
            raise reader.error(f"tensor {info.name}", "one of its name", "two")
        entries[info.name] = _entry(reader, info, start, options)
    return metadata, entries


class _Reader:
    """Reads what comes next, if there is enough left."""

    def __init__(self, path: Path, memory: mmap.mmap):
        self.path, self.memory, self.at = path, memory, 0
        self.bytes = np.frombuffer(memory, np.uint8)

    def error(self, what: str, expected, got) -> ValueError:
        return error(self.path, what, expected, got)

    def take(self, count: int, what: str) -> np.ndarray:
        left = len(self.bytes) - self.at
        if count > left:
            raise self.error(what, f"within the file, {left} bytes from its end", f"{count} bytes")
        self.at += count
        return self.bytes[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        return self.take(np.dtype(kind).itemsize, what).view(kind)[0].item()

    def header(self) -> tuple[int, int, int]:
        magic = self.take(4, "the magic").tobytes()
        if magic != MAGIC:
            raise self.error("the magic", MAGIC, magic)
        version = self.number("<u4", "the version")
        if version not in (2, 3):
            raise self.error("the version", "2 or 3 (little-endian)", version)
        tensors, keys = self.number("<u8", "the count of tensors"), self.number("<u8", "the count of keys")
        # The fewest bytes that one of them takes.
        for count, what, least in ((tensors, "the count of tensors", 24), (keys, "the count of keys", 13)):
            if count * least > len(self.bytes):
                raise self.error(
                    what, f"at most {len(self.bytes) // least} in {len(self.bytes)} bytes", count
                )
        return version, tensors, keys

    def string(self, what: str) -> str:
        text = self.take(self.number("<u8", what), what).tobytes()
        return text.decode("utf-8", errors="replace")

    def strings(self, count: int, what: str) -> list[str]:
        """As `string`, in a third of the time: a tokenizer has a hundred thousand."""
        found, memory, at = [], self.memory, self.at
        for _ in range(count):
            end = at + 8 + int.from_bytes(memory[at : at + 8], "little")
            if end > len(memory):
                raise self.error(what, f"within the file of {len(memory)} bytes", f"a string up to {end}")
            found.append(memory[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        self.at = at
        return found

    def value(self, what: str, depth: int = 0) -> Any:
        return self.of_type(self.number("<u4", what), what, depth)

    def of_type(self, kind: int, what: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.error(f"the type of {what}", "0 to 12", kind)
        if depth == _DEEPEST:
            raise self.error(what, f"an array nested at most {_DEEPEST} deep", "a deeper one")
        inner, count = self.number("<u4", what), self.number("<u8", what)
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return self.take(count * dtype.itemsize, what).view(dtype)
        if count * 8 > len(self.bytes) - self.at:
            raise self.error(what, "an array within the file", f"{count} elements")
        if inner == _STRING:
            return self.strings(count, what)
        return [self.of_type(inner, what, depth + 1) for _ in range(count)]

    def info(self) -> _Info:
        name = self.string("the name of a tensor")
        what = f"tensor {name}"
        rank = self.number("<u4", what)
        if not 1 <= rank <= 4:
            raise self.error(f"the rank of {what}", "1 to 4", rank)
        shape = tuple(self.number("<u8", what) for _ in range(rank))[::-1]
        return _Info(name, shape, self.number("<u4", what), self.number("<u8", what))


def _entry(reader: _Reader, info: _Info, start: int, options: Options) -> Entry:
    what, k = f"tensor {info.name}", info.shape[-1]
    if info.type in PLAIN:
        format, dtype = PLAIN[info.type]
        block, size = 1, np.dtype(dtype).itemsize
    elif info.type in TYPES:
        format, block, size = TYPES[info.type].name, TYPES[info.type].block, TYPES[info.type].size
    elif info.type in UNREPRESENTABLE:
        format, block, size = UNREPRESENTABLE[info.type]
    else:
        format = UNREAD.get(info.type, f"type {info.type}")
        refusal = f"{reader.path}: {what} is {format}, which is not read here"
        return Entry(info.shape, format, 0, partial(converted, refusal, None, options))
    if 0 in info.shape or k % block:
        raise reader.error(f"the shape of {what}", f"positive, with K a multiple of {block}", info.shape)
    nbytes = prod(info.shape) // block * size
    first = start + info.offset
    if first + nbytes > len(reader.bytes):
        raise reader.error(what, f"within {len(reader.bytes)} bytes", f"{nbytes} from {first} on")
    rows = reader.bytes[first : first + nbytes].reshape(*info.shape[:-1], k // block * size)
    if info.type in PLAIN:
        load: Callable = partial(rows.view, np.dtype(dtype))
        return Entry(info.shape, format, nbytes, load)
    if rows.ndim == 1:
        rows = rows[None]
    if info.type in TYPES:
        load = partial(_quantized, TYPES[info.type], rows, options)
    else:
        load = partial(_requantized, reader.path, info, format, rows, options)
    return Entry(info.shape, format, nbytes, load)


def _quantized(kind: BlockType, rows: np.ndarray, options: Options) -> QuantizedTensor:
    """rows: uint8 (..., N, bytes)."""
    return kind.tensor(rows, options.scale_dtype)


def _requantized(path: Path, info: _Info, format: str, rows: np.ndarray, options: Options) -> QuantizedTensor:
    def weight() -> np.ndarray:
        try:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize
        except ModuleNotFoundError as problem:
            raise ImportError(
                'formats.open: requantize needs gguf: pip install "jaxgemv[formats]"'
            ) from problem
        return dequantize(np.ascontiguousarray(rows), GGMLQuantizationType(info.type))

    what = f"{path}: tensor {info.name} is {format}, whose codes stand for several weights each"
    return converted(what, weight, options)


def _with_global_scale(load: Callable, scale: Callable) -> QuantizedTensor:
    """One for the tensor, or one for each of its matrices."""
    w = load()
    stack = w.packed.shape[:-2]
    by = np.asarray(scale(), np.float32)
    return replace(
        w, global_scale=np.ascontiguousarray(np.broadcast_to(by.reshape(stack if by.size > 1 else ()), stack))
    )
