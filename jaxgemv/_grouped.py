"""Slices of x that meet the same matrix of a stack, side by side, so that one read of it serves them all.

A kernel reads a matrix once for all rows of a slice, and again for the next slice. Where there are more slices than
matrices, those with the same index are put together into tiles, each a slice of more rows. Only x and y are moved.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgemv._operands import nowhere
from jaxgemv._shapes import known

# Bytes of weights that are read in the time that it takes to move the rows: six small kernels on a GPU. (H200, int4,
# jitted calls: sparing 42 and 48 MiB made no call faster, 96 MiB one of 117 us to 109, 168 MiB one of 81 to 54.) The
# reference dequantises a matrix for each slice, which always takes longer.
_WORTH = {"cpu": 1 << 20, "cuda": 64 << 20, "xla": 0}

# Up to so many slices all are compared with all, which on a GPU is one small kernel for each sum; above, and on a CPU,
# they are sorted. (`python -m bench.routing`, us. H200: 2048 ids 17 and 190, 8192 80 and 236, 16384 544 and 246. A CPU
# with 16 cores: 64 ids 7 and 3, 2048 1900 and 96.)
_COMPARED = {"cpu": 0, "cuda": 8192, "xla": 0}


def tile_size(batch, rows, stack, *, nbytes, share: int, platform: str) -> int:
    """How many slices make a tile; 1 where they had better stay as they are.

    batch: slices, of `rows` rows each. nbytes: of one matrix of the stack. share: rows that one read can serve.
    """
    if any(known(size) is None for size in (batch, rows, stack, nbytes)):
        return 1
    if batch < 2 * stack or share < 2 * rows or stack == 0:
        return 1
    # Twice the mean, so that most matrices need one tile.
    size = min(share // rows, -(-2 * batch // stack))
    spared = (batch - _tiles(batch, stack, size)) * nbytes
    return size if spared >= _WORTH[platform] else 1


def _tiles(batch: int, stack: int, size: int) -> int:
    """Enough for any index: full ones, and for each matrix at most one that is not full."""
    return (batch + min(stack, batch) * (size - 1)) // size


def in_tiles(
    call: Callable[[Array, Array], Array], x: Array, index: Array, *, stack: int, size: int, platform: str
) -> Array:
    """`call(x, index)`, of x (B, M, K) and index (B,), by way of tiles of `size` slices.

    An index out of range has no tile, and gives NaN, or the least integer, as in `call`. Memory grows with x.
    """
    batch, rows, k = x.shape
    tiles = _tiles(batch, stack, size)
    route = _by_comparing if batch <= _COMPARED[platform] else _by_sorting
    slot, source = route(index, stack, size, tiles * size)

    x = jnp.take(x, source, axis=0, mode="fill", fill_value=0).reshape(tiles, size * rows, k)
    # An empty tile has an index out of range: nothing is read for it.
    y = call(x, jnp.take(index, source[::size], mode="fill", fill_value=-1))
    y = y.reshape(tiles * size, rows, y.shape[-1])
    return jnp.take(y, slot, axis=0, mode="fill", fill_value=nowhere(y.dtype))


def _by_comparing(index: Array, stack: int, size: int, slots: int) -> tuple[Array, Array]:
    """(the slot of each slice, or `slots` for none; the slice of each slot, or B for none)

    A slice's slot comes after those of earlier slices with its index, and after all tiles of lower indices.
    """
    here = np.arange(index.size, dtype=np.int32)
    valid = (index >= 0) & (index < stack)
    rank = jnp.sum((index == index[:, None]) & (here < here[:, None]), axis=1, dtype=jnp.int32)
    opens = valid & (rank % np.int32(size) == 0)
    before = jnp.sum(opens & (index < index[:, None]), axis=1, dtype=jnp.int32)
    slot = jnp.where(valid, before * np.int32(size) + rank, np.int32(slots))
    numbers = np.arange(slots, dtype=np.int32)
    return slot, jnp.min(jnp.where(slot == numbers[:, None], here, np.int32(index.size)), axis=1)


def _by_sorting(index: Array, stack: int, size: int, slots: int) -> tuple[Array, Array]:
    """The same, in time and memory that grow with B log B."""
    key = jnp.where((index >= 0) & (index < stack), index, np.int32(stack))
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    key = key[order]
    # Where each index begins among the sorted, and its tiles among all. (In a shard_map over some axes jax 0.11 has no
    # searchsorted.)
    counts = jnp.zeros(stack + 1, jnp.int32).at[key].add(np.int32(1))
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    tiles = -(-counts[:-1] // np.int32(size))
    before = jnp.concatenate([np.zeros(1, np.int32), jnp.cumsum(tiles, dtype=jnp.int32)])
    rank = np.arange(index.size, dtype=np.int32) - first[key]
    slot = jnp.where(key < stack, before[key] * np.int32(size) + rank, np.int32(slots))
    source = jnp.full(slots, np.int32(index.size)).at[slot].set(order, mode="drop")
    return jnp.zeros_like(slot).at[order].set(slot), source
