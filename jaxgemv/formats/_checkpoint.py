"""`Checkpoint`: the tensors of a file or a folder by name, each made when it is asked for."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from jaxgemv._quantize import quantize
from jaxgemv._tensor import QuantizedTensor


class Entry(NamedTuple):
    """A tensor that has not been read. nbytes: in the file. load: may raise NotImplementedError."""

    shape: tuple[int, ...]
    format: str  # as its family calls it: "Q4_K", "gptq int4", "bfloat16"
    nbytes: int
    load: Callable[[], QuantizedTensor | np.ndarray]

    def __repr__(self) -> str:  # without `load`, which has arrays
        return f"Entry(shape={self.shape}, format={self.format!r}, nbytes={self.nbytes})"


class Checkpoint(Mapping[str, QuantizedTensor | np.ndarray]):
    """The tensors of a checkpoint; opened by `jaxgemv.formats.open`.

    Indexing reads one: arrays are views of the mapped file where its bytes are in our format, and are made anew
    otherwise, each time. Pass them to a jitted function as arguments: closed over they would become constants of the
    program.

    - config: of the model, as its family has it (config.json, or the keys of its architecture in a GGUF file).
    - metadata: all else that the file says about itself.
    - entries: name to shape, format and bytes, without reading.

    Reading a tensor raises KeyError for a name that is not there, ValueError where the file is damaged,
    NotImplementedError where its format has no form here.

    >>> import pathlib, tempfile, jaxgemv.formats, numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_file({"norm.weight": np.ones(128, np.float32)}, path, {"made": "by hand"})
    >>> checkpoint = jaxgemv.formats.open(path)
    >>> checkpoint, checkpoint.metadata["made"], checkpoint.entries["norm.weight"].format
    (<Checkpoint of 1 tensors>, 'by hand', 'float32')
    """

    def __init__(self, entries: Mapping[str, Entry], config: Mapping[str, Any], metadata: Mapping[str, Any]):
        self.entries, self.config, self.metadata = dict(entries), dict(config), dict(metadata)

    def __getitem__(self, name: str) -> QuantizedTensor | np.ndarray:
        if name not in self.entries:
            near = get_close_matches(str(name), self.entries, n=3, cutoff=0) or ["no tensors"]
            raise KeyError(
                f"formats.open: no tensor {name!r}; got {', '.join(near)}, .. (list(checkpoint) has all)"
            )
        with np.errstate(all="ignore"):  # infinities and NaN in a file become those of a weight
            return self.entries[name].load()

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint of {len(self)} tensors>"


class Options(NamedTuple):
    """The options of `open`. scale_dtype: for scales and offsets that would be float32. requantize: arguments of
    `jaxgemv.quantize` for what has no form here, or None to refuse it."""

    scale_dtype: np.dtype | None = None
    requantize: Mapping[str, Any] | None = None


def converted(what: str, weight: Callable[[], np.ndarray] | None, options: Options) -> QuantizedTensor:
    """weight, requantised if the options say how."""
    if weight is None:
        raise NotImplementedError(f"formats.open: {what}")
    if options.requantize is None:
        raise NotImplementedError(f"formats.open: {what}; pass requantize= to convert it")
    return quantize(np.asarray(weight(), np.float32), **options.requantize)
