"""The cells of the grid: which products are measured, and with what weights.

Every two values of DIMENSIONS meet in some cell; a new value, or a new dimension with its line in `weight`, takes part
in that by itself. A group that does not divide K ends ragged; no combination is left out, though formats with a name
have their own group, scale and no shift, whatever the cell asks for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.covering import covering
from bench.measure import nbytes
from jaxgemv import QuantizedTensor
from jaxgemv._formats import FORMATS

DIMENSIONS = {
    "dtype": ("float16", "bfloat16", "float32"),  # of x
    "format": (*(f"int{bits}" for bits in range(1, 9)), *FORMATS),
    "group": (32, 64, 128, 256, 512, None),  # None: one scale a row
    "shift": ("zero", "offset", "none"),
    "scale": ("16-bit", "float32"),  # 16-bit: x's type, or float16 where that is float32
    "rows": (1, 2, 4, 8, 16, 32, 64, 65, 128, 512, 2048),
}
SHAPES = {  # N x K
    "gpu": (
        *((256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192)),
        *((896, 896), (4864, 896), (8960, 1536), (5760, 2880), (4099, 4099)),  # no powers of two
        *((256, 14336), (1024, 4096), (4096, 14336)),  # flat
        *((65536, 256), (28672, 4096), (128256, 4096)),  # tall
    ),
    "cpu": (
        *((256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096)),
        *((896, 896), (4864, 896), (1536, 1536), (2880, 2880), (1000, 4099)),
        *((64, 14336), (256, 4096), (2048, 8192)),
        *((16384, 256), (14336, 4096), (32000, 2048)),
    ),
}
# What has no part in XLA's dense product: cells beyond those that pairs need differ in these, and share its time.
_OURS = "format", "group", "shift", "scale"
_DISTINCT = 1 << 21  # numbers of an array; then they repeat themselves, which no product can notice


class Cell(NamedTuple):
    dtype: str
    format: str
    group: int | None
    shift: str
    scale: str
    rows: int
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        return FORMATS[self.format].bits if self.format in FORMATS else int(self.format.removeprefix("int"))

    @property
    def made(self) -> "Cell":
        """What the weight is like."""
        if self.format not in FORMATS:
            return self
        of = FORMATS[self.format]
        return self._replace(
            group=self.group if of.any_group else of.group_size,
            shift="none",
            scale=self.scale if of.scale_dtype is None else jnp.dtype(of.scale_dtype).name,
        )

    @property
    def flops(self) -> int:
        return 2 * self.rows * math.prod(self.shape)


def cells(platform: str, seed: int, fewest: int, chosen: Mapping[str, Sequence | None]) -> list[Cell]:
    """chosen: values instead of those of a dimension. Cells of the same shape and type of x are neighbours."""
    dimensions = DIMENSIONS | {"shape": SHAPES[platform]}
    dimensions |= {name: values for name, values in chosen.items() if values is not None}
    if empty := [name for name, values in dimensions.items() if not values]:
        raise SystemExit(f"bench: the grid has no such {', '.join(empty)}")

    def few_rows(cell):  # which are what this library is about, and quick
        return cell["rows"] <= 64

    found = [Cell(**each) for each in covering(dimensions, seed, fewest, _OURS, few_rows)]
    order = dimensions["shape"], dimensions["dtype"]
    return sorted(found, key=lambda c: (order[0].index(c.shape), order[1].index(c.dtype), c.rows))


def weight(cell: Cell, array: Callable) -> QuantizedTensor:
    """array: (name, shape, dtype) -> one."""
    cell, of = cell.made, FORMATS.get(cell.format)
    n, k = cell.shape
    group = min(cell.group or k, k)
    shape = (n,) if cell.group is None else (n, -(-k // group))
    dtype = cell.scale
    if dtype == "16-bit":
        dtype = "float16" if cell.dtype == "float32" else cell.dtype
    is_float8 = of is not None and of.codebook is None
    return QuantizedTensor(
        packed=array("float8", (n, k), "float8_e4m3fn")
        if is_float8
        else array("packed", (n, -(-k * cell.bits // 32)), "uint32"),
        scale=array("scale", shape, dtype),
        **({} if cell.shift == "none" else {cell.shift: array(cell.shift, shape, dtype)}),
        codebook=None if of is None or is_float8 else of.values,
        global_scale=np.float32(1) if of is not None and of.global_scale else None,
        bits=cell.bits,
        group_size=group if cell.group and k % group else None,
        k=k if not is_float8 and k * cell.bits % 32 else None,
    )


def shape_only(name: str, shape: tuple, dtype: str):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def random(bits: int) -> Callable:
    """Arrays of the host, which need no compilation: codes of all kinds, weights of magnitude 1, x and matrices."""
    rng, codes = np.random.default_rng(0), 1 << bits
    make = {
        "packed": lambda size: rng.integers(0, 1 << 32, size, np.uint32),
        "scale": lambda size: rng.uniform(0.5, 1.5, size) / codes,
        "zero": lambda size: rng.integers(0, codes, size),
        "offset": lambda size: rng.uniform(-1, 0, size),
        "normal": lambda size: rng.standard_normal(size, np.float32),
        "float8": lambda size: rng.standard_normal(size, np.float32),
    }

    def array(name, shape, dtype):
        some = make[name](min(math.prod(shape), _DISTINCT)).astype(jnp.dtype(dtype))
        return np.resize(some, shape)

    return array


def total_bytes(cell: Cell) -> int:
    """Of the weight, x and y."""
    leaves = jax.tree.leaves(weight(cell, shape_only))
    return sum(map(nbytes, leaves)) + cell.rows * sum(cell.shape) * jnp.dtype(cell.dtype).itemsize
