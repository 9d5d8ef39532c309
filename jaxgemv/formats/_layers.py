"""What the families of safetensors share: the tensors that make up a weight, and checks of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxgemv import codebooks
from jaxgemv._check import names_of
from jaxgemv._tensor import QuantizedTensor
from jaxgemv.formats._bits import packed_words, unpacked
from jaxgemv.formats._checkpoint import Entry, Options, converted

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))
WORDS = (np.dtype(np.int32), np.dtype(np.uint32))
UINT8, INT8 = np.dtype(np.uint8), np.dtype(np.int8)
INTEGERS = tuple(np.dtype(kind) for kind in (np.uint8, np.int32, np.int64))


class Source(NamedTuple):
    """A checkpoint before any family has looked at it. quantization: what its config says of its codes."""

    tensors: Mapping[str, np.ndarray]
    places: Mapping[str, Path]  # of tensors
    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    options: Options


@dataclass(frozen=True)
class Layer:
    """The tensors of one weight: those called prefix + suffix, for some suffixes. name: the weight's."""

    source: Source
    prefix: str
    name: str

    @property
    def quantization(self) -> Mapping[str, Any]:
        return self.source.quantization

    @property
    def weight_schemes(self) -> list[dict]:
        """What each group of modules in compressed-tensors' config says of its weights."""
        return objects([group.get("weights") for group in objects(self.quantization.get("config_groups"))])

    def get(self, suffix: str) -> np.ndarray | None:
        return self.source.tensors.get(self.prefix + suffix)

    def error(self, suffix: str, expected, got) -> ValueError:
        name = self.prefix + suffix
        path = self.source.places.get(name) or next(iter(self.source.places.values()))
        return ValueError(f"formats.open: {path}: tensor {name} must be {expected}; got {got}")

    def need(self, suffix: str, dtypes=None, shape: tuple[int | None, ...] | None = None) -> np.ndarray:
        """The tensor, of one of these dtypes; None stands for any size."""
        a = self.get(suffix)
        if a is None:
            raise self.error(suffix, "there", "no such tensor")
        if dtypes and a.dtype not in dtypes:
            raise self.error(suffix, names_of(dtypes), a.dtype)
        if shape is not None and (
            len(shape) != a.ndim or any(n not in (None, size) for n, size in zip(shape, a.shape))
        ):
            sizes = ", ".join("any" if n is None else str(n) for n in shape)
            raise self.error(suffix, f"of shape ({sizes})", a.shape)
        if a.size == 0:
            raise self.error(suffix, "of one element at least", a.shape)
        return a

    def need_if(self, stated: bool, suffix: str, why: str) -> None:
        """Raises if the config states that there is such a tensor, and there is none."""
        if stated and self.get(suffix) is None:
            raise self.error(suffix, f"there, since the config has {why}", "no such tensor")

    def is_by(self, *methods: str) -> bool:
        """Whether the config names one of these methods, or none."""
        method = str(self.quantization.get("quant_method") or "").lower()
        return not method or any(name in method for name in methods)

    def one_each(self, suffix: str, lead: tuple[int, ...]) -> np.ndarray:
        """A float for each entry of a stack."""
        a = self.need(suffix, FLOATS)
        if a.size != prod(lead):
            raise self.error(suffix, f"one for each of {lead}" if lead else "one number", f"shape {a.shape}")
        return a.reshape(lead)

    def setting(self, *keys: str, least: int = 1) -> int | None:
        """An integer of the config under one of these names."""
        for key in keys:
            value = self.quantization.get(key)
            if value is not None:
                if type(value) is not int or value < least:
                    raise self.error("", f"described with an integer {key}", repr(value))
                return value
        return None

    def group_of(self, suffix: str, k: int, groups: int, stated: int | None) -> tuple[int, int | None]:
        """The group size, and what QuantizedTensor's group_size has to be. Where none is stated, groups divide
        K; 0 and -1 state one group of all K."""
        stated = k if stated in (-1, 0) else stated
        if stated is not None and groups == -(-k // stated):
            stated = min(stated, k)
            return stated, stated if k % stated else None
        if k % groups:
            raise self.error(
                suffix, f"in groups that divide {k}, or of the stated size {stated}", f"{groups} groups"
            )
        return k // groups, None

    def entry(
        self,
        suffixes: tuple[str, ...],
        shape: tuple[int, ...],
        format: str,
        load: Callable[[], QuantizedTensor],
    ) -> Entry:
        nbytes = sum(a.nbytes for suffix in suffixes if (a := self.get(suffix)) is not None)
        return Entry(tuple(shape), format, nbytes, load)

    def refused(
        self,
        suffixes: tuple[str, ...],
        shape: tuple[int, ...],
        format: str,
        why: str,
        weight: Callable[[], np.ndarray] | None = None,
    ) -> Entry:
        """The entry of a weight that has no form here. weight: computes it."""
        return self.entry(suffixes, shape, format, partial(self.converted, format, why, weight))

    def converted(self, format: str, why: str, weight: Callable[[], np.ndarray] | None) -> QuantizedTensor:
        """weight, requantised if the options say how."""
        places = (place for name, place in self.source.places.items() if name.startswith(self.prefix))
        what = f"{next(places)}: tensor {self.name} is {format}, {why}"
        return converted(what, weight, self.source.options)


def objects(of: Any) -> list[dict]:
    """The JSON objects in an object or list of a config; none in anything else."""
    values = of.values() if isinstance(of, dict) else of if isinstance(of, list) else ()
    return [value for value in values if isinstance(value, dict)]


def ragged(k: int, bits: int) -> int | None:
    """What QuantizedTensor's k has to be."""
    return k if k * bits % 32 else None


def stacked(table: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The same codebook or permutation for each entry of a stack."""
    return np.ascontiguousarray(np.broadcast_to(table, (*lead, *table.shape)))


def words(a: np.ndarray) -> np.ndarray:
    return a.view(np.uint32)


def signed_bytes(a: np.ndarray) -> np.ndarray:
    """int8 (..., K) as 8-bit codes, of which 128 stands for 0: uint8 with rows of whole words."""
    codes = a.view(np.uint8) ^ np.uint8(0x80)
    return packed_words(codes, 8) if a.shape[-1] % 4 else codes


def order_of_groups(layer: Layer, suffix: str, g_idx: np.ndarray, groups: int, group: int):
    """The permutation that sorts columns by group, None if they are; and whether it gives groups of that size.

    Raises ValueError for groups that are not there.
    """
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise layer.error(suffix, f"from 0 to {groups - 1}", f"{g_idx.min()} to {g_idx.max()}")
    regular = np.arange(len(g_idx)) // group
    if (g_idx == regular).all():
        return None, True
    perm = np.argsort(g_idx, kind="stable").astype(np.int32)
    return perm, bool((g_idx[perm] == regular).all())


def permuted(packed: np.ndarray, bits: int, perm: np.ndarray) -> np.ndarray:
    return packed_words(unpacked(packed, bits, len(perm))[..., perm], bits)


def fp4(layer: Layer, suffixes: tuple[str, ...], packed: np.ndarray, scale: np.ndarray, by=None) -> Entry:
    """E2M1 with the lower nibble first: packed uint8 (..., N, K / 2), and scale (..., N, K / g), whose dtype says
    whether it is NVFP4 with g = 16 or MXFP4 with g = 32. by: computes the global scale."""
    *lead, n, width = packed.shape
    group = 16 if scale.dtype == E4M3 else 32
    if scale.shape != (*lead, n, width * 2 // group) or width * 2 % group:
        raise layer.error(suffixes[1], f"of shape {(*lead, n, width * 2 // group)}", scale.shape)

    def load():
        return QuantizedTensor(
            packed=packed,
            scale=scale,
            codebook=stacked(codebooks.E2M1, tuple(lead)),
            global_scale=None if by is None else np.asarray(by(), np.float32).reshape(lead),
            bits=4,
        )

    return layer.entry(suffixes, (*lead, n, width * 2), "nvfp4" if group == 16 else "mxfp4", load)
