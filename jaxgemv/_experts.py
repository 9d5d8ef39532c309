"""Slices of x that meet the same matrix of a stack, side by side, so that one read of it serves them all.

A kernel reads a matrix once for all rows of a slice, and again for the next slice. Where there are more slices than
matrices, those with the same index are put together into tiles, each a slice of more rows. Only x and y are moved.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

# Bytes of weights that are read in the time that it takes to move the rows: six small kernels on a GPU. (H200, int4,
# jitted calls: sparing 42 and 48 MiB made no call faster, 96 MiB one of 117 us to 109, 168 MiB one of 81 to 54.)
_WORTH = {"cpu": 1 << 20, "cuda": 64 << 20}


def tile_size(batch, rows, stack, *, nbytes, share: int, platform: str) -> int:
    """How many slices make a tile; 1 where they had better stay as they are.

    batch: slices, of `rows` rows each. nbytes: of one matrix of the stack. share: rows that one read can serve.
    """
    if not all(isinstance(size, int) for size in (batch, rows, stack, nbytes)):
        return 1  # symbolic, under jax.export
    if batch < 2 * stack or share < 2 * rows:
        return 1
    # Twice the mean, so that most matrices need one tile.
    size = min(share // rows, -(-2 * batch // stack))
    spared = (batch - _tiles(batch, stack, size)) * nbytes
    return size if spared >= _WORTH[platform] else 1


def _tiles(batch: int, stack: int, size: int) -> int:
    """Enough for any index: that many at most are whole, and one of each matrix is not."""
    return (batch + min(stack, batch) * (size - 1)) // size


def in_tiles(
    call: Callable[[Array, Array], Array], x: Array, index: Array, *, stack: int, size: int
) -> Array:
    """`call(x, index)`, of x (B, M, K) and index (B,), by way of tiles of `size` slices.

    An index out of range has no tile, and gives NaN as in `call`.
    """
    batch, rows, k = x.shape
    tiles = _tiles(batch, stack, size)
    slots = np.arange(tiles * size, dtype=np.int32)
    here = np.arange(batch, dtype=np.int32)
    valid = (index >= 0) & (index < stack)
    # Each slice has a slot: behind those of its own index that come before it, and all tiles of lower ones. Counted
    # by comparing all with all, which is less work than to sort: each sum is one kernel.
    rank = jnp.sum((index == index[:, None]) & (here < here[:, None]), axis=1, dtype=jnp.int32)
    opens = valid & (rank % np.int32(size) == 0)
    before = jnp.sum(opens & (index < index[:, None]), axis=1, dtype=jnp.int32)
    slot = jnp.where(valid, before * np.int32(size) + rank, np.int32(slots.size))
    # And each slot a slice, or none.
    source = jnp.min(jnp.where(slot == slots[:, None], here, np.int32(batch)), axis=1)

    x = jnp.take(x, source, axis=0, mode="fill", fill_value=0).reshape(tiles, size * rows, k)
    # An empty tile has an index out of range: nothing is read for it.
    y = call(x, jnp.take(index, source[::size], mode="fill", fill_value=-1))
    y = y.reshape(slots.size, rows, y.shape[-1])
    return jnp.take(y, slot, axis=0, mode="fill", fill_value=np.nan)
