"""Random problems, and their answers in float64 from the bytes alone: nothing here uses jaxgemv's arithmetic."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgemv import QuantizedTensor

FLOAT8 = "float8_e4m3fn", "float8_e5m2"


class Case(NamedTuple):
    """group: codes that share a scale, or "row" for scale (N,), or "tensor" for scale ().

    form: "mid" (no zero), "zero" (integers in scale's dtype), "fraction" (fractional zero), "integer" (int32 zero)
    or "offset". Bias, uint8 bytes and a dtype of scale, zero and offset that is not x's ride along with some cases
    rather than multiply them.
    """

    m: int
    n: int
    k: int
    group: int | str = "row"
    form: str = "mid"
    bias: bool = False
    bytes: bool = False
    scale: str = ""

    def __str__(self) -> str:
        extras = "-bias" * self.bias + "-bytes" * self.bytes + f"-{self.scale}" * bool(self.scale)
        return f"{self.m}x{self.n}x{self.k}-{self.group}-{self.form}{extras}"


@dataclasses.dataclass(frozen=True)
class Problem:
    x: np.ndarray
    packed: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    offset: np.ndarray | None
    bias: np.ndarray | None
    bits: int
    group: int
    codebook: np.ndarray | None = None

    @classmethod
    def of(cls, x: np.ndarray, w: QuantizedTensor, group: int) -> "Problem":
        """What x times w asks for, w from anywhere."""
        arrays = {f: getattr(w, f) for f in ("packed", "scale", "zero", "offset", "codebook")}
        arrays = {f: None if a is None else np.asarray(a) for f, a in arrays.items()}
        return cls(x=x, **arrays, bias=None, bits=w.bits, group=group)

    @property
    def k(self) -> int:
        return self.x.shape[-1]

    @property
    def tensor(self) -> QuantizedTensor:
        """With group_size and k only where the arrays cannot tell."""
        return QuantizedTensor(
            packed=self.packed,
            scale=self.scale,
            zero=self.zero,
            offset=self.offset,
            codebook=self.codebook,
            bits=self.bits,
            group_size=self.group if self.k % self.group else None,
            k=self.k if self.k * self.bits % 32 and not self.is_float8 else None,
        )

    @property
    def is_float8(self) -> bool:
        return self.packed.dtype.name in FLOAT8

    def values(self) -> np.ndarray:
        """What the codes stand for, float64 (..., N, K)"""
        if self.is_float8:
            return self.packed.astype(np.float64)
        q = unpack_bits(self.packed, self.bits, self.k)
        return q.astype(np.float64) if self.codebook is None else self.codebook.astype(np.float64)[q]

    def weight(self) -> np.ndarray:
        """float64 (..., N, K)"""
        q, scale = self.values(), self._wide(self.scale)
        if self.offset is not None:
            return q * scale + self._wide(self.offset)
        return (q - self._zero()) * scale

    def answer(self) -> np.ndarray:
        """float64 (..., N)"""
        y = np.asarray(self.x, np.float64) @ self.weight().swapaxes(-1, -2)
        return y if self.bias is None else y + np.asarray(self.bias, np.float64)

    def magnitude(self) -> np.ndarray:
        """What rounding errors are relative to; see tolerance.py."""
        y = np.abs(np.asarray(self.x, np.float64)) @ self.weight_magnitude().swapaxes(-1, -2)
        return y if self.bias is None else y + np.abs(np.asarray(self.bias, np.float64))

    def weight_magnitude(self) -> np.ndarray:
        q, scale = np.abs(self.values()), self._wide(self.scale)
        shift = self._zero() * scale if self.offset is None else self._wide(self.offset)
        return q * np.abs(scale) + np.abs(shift)

    def wide_scale(self) -> np.ndarray:
        """(), (N,) or (N, G) against (N, K)"""
        return self._wide(self.scale)

    def _zero(self) -> np.ndarray | int:
        if self.codebook is not None or self.is_float8:
            return 0
        return 1 << self.bits - 1 if self.zero is None else self._wide(self.zero)

    def _wide(self, parameter: np.ndarray) -> np.ndarray:
        """(), (N,) or (N, G) against (N, K)"""
        p = np.asarray(parameter, np.float64)
        if p.ndim < 2:
            return p.reshape(*p.shape, *(1,) * (2 - p.ndim))
        return np.repeat(p, self.group, axis=-1)[..., : self.k]


def make(
    rng, bits: int, dtype: str, case: Case, *, exact: bool = False, scale_dtype=None, format: str = "affine"
) -> Problem:
    """A random problem; `exact` makes every partial sum, in any order, a float32, so results must be equal.

    Exact values are small integers times powers of two: their sums stay far below 2^24 of the smallest unit.
    """
    dtype, scale_dtype = jnp.dtype(dtype), jnp.dtype(scale_dtype or case.scale or dtype)
    scale_dtype = jnp.dtype(np.float32) if scale_dtype == np.int8 else scale_dtype
    m, n, k, group = *case[:3], case.k if isinstance(case.group, str) else case.group
    shape = {"tensor": (), "row": (n,)}.get(case.group, (n, -(-k // group)))
    integers = partial(rng.integers, endpoint=True)
    if exact:
        x = integers(-2, 2, (m, k))
        scale = 2.0 ** integers(-1, 1, shape)
        offset, bias = integers(-8, 8, shape), integers(-8, 8, n)
    else:
        x = integers(-128, 127, (m, k)) if dtype == np.int8 else rng.standard_normal((m, k))
        scale = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
        offset, bias = rng.standard_normal(shape), rng.standard_normal(n)
    if scale_dtype.itemsize == 1:  # of which one has no sign; and parameters that are not scales have 16 bits
        scale, scale_dtype = np.abs(scale).astype(scale_dtype), dtype
    zero = None
    if case.form in ("zero", "fraction", "integer"):
        zero = integers(0, 1 << bits, shape) + 0.5 * (case.form == "fraction")
        zero = np.asarray(zero).astype(np.int32 if case.form == "integer" else scale_dtype)
    codebook = None
    if format in FLOAT8:
        values = integers(-8, 8, (n, k)) / 4 if exact else rng.standard_normal((n, k))
        packed = values.astype(jnp.dtype(format))
    else:
        packed = pack_bits(integers(0, (1 << bits) - 1, (n, k)), bits)
        packed = packed.view(np.uint8) if case.bytes else packed
    if format == "codebook":
        book = integers(-32, 32, 1 << bits) / 4 if exact else rng.standard_normal(1 << bits)
        codebook = book.astype(scale_dtype)
    if format != "affine":
        case = case._replace(form="mid")
        zero = None
    return Problem(
        x=np.asarray(x).astype(dtype),
        packed=packed,
        scale=scale if scale.dtype.itemsize == 1 else np.asarray(scale).astype(scale_dtype),
        zero=zero,
        offset=np.asarray(offset).astype(scale_dtype) if case.form == "offset" else None,
        bias=np.asarray(bias).astype(np.float32 if dtype == np.int8 else dtype) if case.bias else None,
        bits=bits,
        group=group,
        codebook=codebook,
    )


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """The packed format, spelled out bit by bit."""
    stream = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    stream = stream.reshape(*codes.shape[:-1], -1)
    stream = np.pad(stream, [(0, 0)] * (codes.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def unpack_bits(packed: np.ndarray, bits: int, k: int) -> np.ndarray:
    stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : k * bits].reshape(*packed.shape[:-1], k, bits)
    return stream @ (1 << np.arange(bits))
