"""ONNX Runtime's MatMulNBits, in an .onnx file whose data are inside or beside it.

Of a node with attributes K, N, bits and block_size: B uint8 (N, G, block_size bits / 8), whose rows are our bytes,
padded to whole blocks; scales (N, G) or flat; zero_points either uint8, packed along G (ceil(G bits / 8) bytes a row),
or floats like scales; without them the mid code. The weight has B's name without what tells of its bits.

Source: docs/ContribOperators.md of https://github.com/microsoft/onnxruntime.
"""

import mmap
import re
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import unpacked
from jaxgemv.formats._checkpoint import Checkpoint, Entry, Options, converted
from jaxgemv.formats._layers import FLOATS, UINT8, ragged

_BITS = (2, 4, 8)
_QUANTIZED_NAME = re.compile(r"_Q\d+(G\d+)?$|_quantized$")


def read(path: Path, options: Options) -> Checkpoint:
    try:
        import onnx  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError('formats.open: an ONNX file needs onnx: pip install "jaxgemv[formats]"') from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"formats.open: {path}: the file must be an ONNX model; got {error}") from None
    arrays = _Arrays(path, {t.name: t for t in model.graph.initializer})
    if not model.ir_version or not (model.graph.node or arrays.tensors):
        raise arrays.error("the file", "an ONNX model with a graph", "none")
    entries: dict[str, Entry] = {}
    of: dict[str, tuple[str, ...]] = {}  # the inputs that a quantised weight is made of
    for node in model.graph.node:
        if node.op_type == "MatMulNBits" and len(node.input) > 1 and node.input[1] in arrays.tensors:
            name = _QUANTIZED_NAME.sub("", node.input[1]).replace(".qweight", ".weight")
            inputs = tuple(node.input[1:5])
            if of.setdefault(name, inputs) != inputs:
                raise arrays.error(f"tensor {name}", "there once", f"{of[name]} and {inputs}")
            entries[name] = _entry(arrays, name, node, options)
    parts = {part for inputs in of.values() for part in inputs}
    for name in arrays.tensors:
        if name in parts:
            continue
        if name in entries:
            raise arrays.error(f"tensor {name}", "there once", "a quantised one too")
        entries[name] = arrays.entry(name)
    metadata = {"ir_version": model.ir_version, "producer_name": model.producer_name}
    return Checkpoint(entries, {}, metadata | {p.key: p.value for p in model.metadata_props})


class _Arrays:
    """Initializers as numpy views: of the parsed file, or of the mapped one that has the data."""

    def __init__(self, path: Path, tensors: dict[str, Any]):
        self.path, self.tensors = path, tensors
        self.files: dict[str, np.ndarray] = {}

    def error(self, what: str, expected, got) -> ValueError:
        return ValueError(f"formats.open: {self.path}: {what} must be {expected}; got {got}")

    def entry(self, name: str) -> Entry:
        shape, dtype = self.kind(name)
        return Entry(shape, dtype.name, prod(shape) * dtype.itemsize, partial(self.array, name))

    def kind(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        from onnx.helper import tensor_dtype_to_np_dtype  # pyright: ignore[reportMissingImports]

        tensor = self.tensors[name]
        try:
            dtype = np.dtype(tensor_dtype_to_np_dtype(tensor.data_type))
        except KeyError:
            raise self.error(f"the dtype of {name}", "one of ONNX's", tensor.data_type) from None
        if min(tensor.dims, default=0) < 0:
            raise self.error(f"the shape of {name}", "of sizes", tuple(tensor.dims))
        return tuple(tensor.dims), dtype

    def array(self, name: str) -> np.ndarray:
        from onnx import TensorProto, numpy_helper  # pyright: ignore[reportMissingImports]

        tensor, (shape, dtype) = self.tensors[name], self.kind(name)
        try:
            if tensor.data_location != TensorProto.EXTERNAL:
                return numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise self.error(f"tensor {name}", f"{dtype} {shape}", error) from None
        place = {item.key: item.value for item in tensor.external_data}
        file = self.file(place.get("location", ""), name)
        nbytes = prod(shape) * dtype.itemsize
        try:
            first, length = int(place.get("offset", 0)), int(place.get("length", nbytes))
        except ValueError:
            raise self.error(f"the offset of {name}", "an integer", place) from None
        if first < 0 or length != nbytes or first + nbytes > len(file):
            raise self.error(
                f"tensor {name}", f"{nbytes} bytes within {len(file)}", f"{length} from {first} on"
            )
        return file[first : first + nbytes].view(dtype).reshape(shape)

    def file(self, location: str, name: str) -> np.ndarray:
        if location not in self.files:
            path = self.path.parent / location
            if Path(location).name != location or not path.is_file() or path.stat().st_size == 0:
                raise self.error(f"the data of {name}", "in a file beside it", repr(location))
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.files[location] = np.frombuffer(memory, np.uint8)
        return self.files[location]


def _entry(arrays: _Arrays, name: str, node, options: Options) -> Entry:
    what = f"node {node.name or name}"
    attributes = {a.name: a.i for a in node.attribute}
    n, k, bits, block = (attributes.get(key, 0) for key in ("N", "K", "bits", "block_size"))
    bits = bits or 4
    if min(n, k) < 1 or block < 16 or block & block - 1 or bits not in _BITS:
        raise arrays.error(what, "with K, N, 2, 4 or 8 bits, block_size 16, 32 ...", attributes)
    inputs = [*node.input, *[""] * 6]
    groups = -(-k // block)
    width = groups * block * bits // 8
    parts = [part for part in inputs[1:5] if part in arrays.tensors]
    nbytes = sum(arrays.entry(part).nbytes for part in parts)

    def array(place: int, dtypes, size: int) -> np.ndarray:
        part = inputs[place]
        if part not in arrays.tensors:
            raise arrays.error(f"input {part} of {what}", "an initializer", "none")
        shape, dtype = arrays.kind(part)
        if dtype not in dtypes or prod(shape) != size:
            raise arrays.error(
                f"tensor {part}", f"{size} of {' or '.join(map(str, dtypes))}", f"{dtype} {shape}"
            )
        return arrays.array(part).reshape(n, -1)

    def load() -> QuantizedTensor:
        packed = array(1, (UINT8,), n * width)
        zero = None
        if inputs[3]:
            by_bytes = inputs[3] in arrays.tensors and arrays.kind(inputs[3])[1] == UINT8
            size = -(-groups * bits // 8) if by_bytes else groups
            zero = array(3, (UINT8,) if by_bytes else FLOATS, n * size)
            zero = unpacked(zero, bits, groups) if by_bytes else zero
        return QuantizedTensor(
            packed=packed[:, : -(-k * bits // 32) * 4],
            scale=array(2, FLOATS, n * groups),
            zero=zero,
            bits=bits,
            group_size=block if k % block else None,
            k=ragged(k, bits),
        )

    format = f"onnx int{bits}"
    if inputs[4]:
        what = (
            f"{arrays.path}: tensor {name} is {format}, with g_idx, which is no longer a part of the operator"
        )
        return Entry((n, k), format, nbytes, partial(converted, what, None, options))
    return Entry((n, k), format, nbytes, load)
