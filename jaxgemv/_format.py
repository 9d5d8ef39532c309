"""The packed format: `pack`, `unpack`, and from codes to weights.

A row of K codes of b bits is one dense little-endian bit stream: code k sits in bits [k b, (k + 1) b),
least significant bit first, padded to whole 32-bit words. These are the words of compressed-tensors, of MLX
and of AWQ-gemv, and GPTQ's transposed. See docs/format.md.
"""

from functools import partial
from math import gcd, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxgemv._check import FLOAT8, as_array, check_bits, check_k, check_packed, words_per_row
from jaxgemv._operands import is_explicit
from jaxgemv._shapes import any_rank

_SIGNED_CODES = ("int2", "int4", "int8")


def pack(codes: ArrayLike, bits: int) -> Array:
    """Packs codes (..., K) into uint32 words (..., ceil(K b / 32)).

    Arrays of a signed code dtype (int2, int4, int8) hold values from -2^(b-1), stored as value + 2^(b-1), so that
    `zero=None` gives them back; every other integer dtype holds the codes 0 .. 2^b - 1 themselves.

    Raises TypeError for a dtype that is not an integer, ValueError for bits, for a scalar, and for codes out of
    range (which only concrete arrays can show; under `jit` their high bits are dropped).

    >>> import jax.numpy as jnp, jaxgemv
    >>> packed = jaxgemv.pack(jnp.arange(8), bits=4)
    >>> packed.shape, hex(packed[0])
    ((1,), '0x76543210')
    """
    bits = check_bits("pack", bits)
    codes = as_array("pack", "codes", codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"pack: codes must be integers; got {codes.dtype}")
    if codes.ndim == 0 or codes.shape[-1] == 0:
        raise ValueError(f"pack: codes must have shape (..., K) with K >= 1; got {codes.shape}")
    low = -(1 << bits - 1) if codes.dtype.name in _SIGNED_CODES else 0
    if not isinstance(codes, Tracer) and codes.size:
        values = np.asarray(codes)
        values = values if values.dtype.kind in "iu" else values.astype(np.int8)  # int4 has no order in numpy
        least, most = int(values.min()), int(values.max())
        if least < low or most >= low + (1 << bits):
            raise ValueError(
                f"pack: {bits}-bit codes of dtype {codes.dtype} must lie in [{low}, {low + (1 << bits) - 1}]; "
                f"got [{least}, {most}]"
            )
    if codes.dtype.itemsize > 4:  # np.int64, which jnp.asarray would warn about
        return _pack(jnp.asarray(codes.astype(np.uint32)), bits=bits, low=low)
    return _pack(jnp.asarray(codes), bits=bits, low=low)


def pack_unsigned(codes: Array, bits: int) -> Array:
    """`pack` for codes that are known to lie in 0 .. 2^b - 1."""
    return _pack(codes, bits=bits, low=0)


@partial(jax.jit, static_argnames=("bits", "low"))
@any_rank
def _pack(codes, *, bits, low):
    count, words = _block(bits)
    word, shift = (places[:, 0] for places in _places(bits))
    k = codes.shape[-1]
    codes = (codes.astype(jnp.int32) - low).astype(jnp.uint32) & np.uint32((1 << bits) - 1)
    codes = pad_last(codes, -k % count).reshape(*codes.shape[:-1], -(-k // count), 1, count)
    here = word == np.arange(words)[:, None]
    next_too = (word + 1 == np.arange(words)[:, None]) & (shift + bits > 32)
    # Codes do not overlap, so that their sum is their union.
    parts = jnp.where(here, codes << shift, 0) + jnp.where(next_too, codes >> (32 - shift) % 32, 0)
    packed = jnp.sum(parts, axis=-1, dtype=jnp.uint32)
    return packed.reshape(*packed.shape[:-2], packed.shape[-2] * words)[..., : words_per_row(k, bits)]


def unpack(packed: ArrayLike, bits: int, k: int) -> Array:
    """The codes of packed words: uint32 (..., ceil(k b / 32)), or uint8 with the same bytes, to uint8 (..., k).

    Raises TypeError for another dtype, ValueError for bits, and for words that are not those of k codes.

    >>> import jax.numpy as jnp, jaxgemv
    >>> jaxgemv.unpack(jnp.array([0x76543210], jnp.uint32), bits=4, k=7)
    Array([0, 1, 2, 3, 4, 5, 6], dtype=uint8)
    """
    bits = check_bits("unpack", bits)
    packed = as_array("unpack", "packed", packed)
    if packed.dtype in FLOAT8:
        raise TypeError(f"unpack: packed must be uint32, or uint8 with the same bytes; got {packed.dtype}")
    k = check_k("unpack", "k", k)
    check_packed("unpack", "packed", packed, bits, k, "")
    return _unpack(jnp.asarray(packed), bits=bits, k=k)


@partial(jax.jit, static_argnames=("bits", "k"))
@any_rank
def _unpack(packed, *, bits, k):
    if packed.dtype == jnp.uint8:
        packed = jax.lax.bitcast_convert_type(
            packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4), jnp.uint32
        )
    if bits == 8:
        codes = jax.lax.bitcast_convert_type(packed, jnp.uint8)
        return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 4)[..., :k]
    count, words = _block(bits)
    # Codes come in runs that fit into one word: it is put together from one packed word or two, and gives each code.
    run = count if words == 1 else 4
    word, shift = _places(bits, run)
    blocks = -(-packed.shape[-1] // words)
    packed = pad_last(packed, -packed.shape[-1] % words).reshape(*packed.shape[:-1], blocks, words)

    def words_at(i):
        # One for each code, though a run shares it: then XLA keeps one loop, and its compiler sees what is shared.
        return jnp.broadcast_to(packed[..., i, None, None], (*packed.shape[:-1], count // run, run))

    # Selected word by word: XLA of jaxlib 0.8 folds a gather of constants to the wrong values.
    codes = words_at(0)
    if words > 1:
        first, rest = codes, words_at(1)
        for i in range(1, words):
            first = jnp.where(word >= i, words_at(i), first)
            rest = jnp.where(word + 1 >= i, words_at(i), rest)
        straddles = shift + run * bits > 32
        codes = first >> shift | jnp.where(straddles, rest << (32 - shift) % 32, 0)
    codes = codes >> np.arange(run, dtype=np.uint32) * np.uint32(bits)
    codes = (codes & np.uint32((1 << bits) - 1)).astype(jnp.uint8)
    return codes.reshape(*codes.shape[:-3], blocks * count)[..., :k]


def _block(bits: int) -> tuple[int, int]:
    """The shortest run of whole words: (codes, words) in it."""
    common = gcd(bits, 32)
    return 32 // common, bits // common


def _places(bits: int, run: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """For each run of codes in a block the word it starts in, and the bit there; both (runs, 1)."""
    word, shift = np.divmod(np.arange(0, _block(bits)[0], run)[:, None] * bits, 32)
    return word, shift.astype(np.uint32)


def pad_last(a: Array, count: int) -> Array:
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count)]) if count else a


@any_rank
def weights(
    packed, scale, zero=None, offset=None, codebook=None, global_scale=None, *, bits, group, k
) -> Array:
    """float32 (..., N, K) from checked arrays; `group` None when one group spans the row."""
    packed = jnp.asarray(packed)
    is_float8 = packed.dtype in FLOAT8
    codes = packed[..., :k] if is_float8 else _unpack(packed, bits=bits, k=k)
    if codebook is not None:
        q = _look_up(jnp.asarray(codebook).astype(jnp.float32), codes)
    else:
        q = codes.astype(jnp.float32)
    wide = partial(spread, ndim=codes.ndim, group=group, k=k)
    if codebook is None and offset is None and not is_float8:
        q = q - (np.float32(1 << bits - 1) if zero is None else wide(zero))
    w = q * wide(scale)
    w = w if offset is None else w + wide(offset)
    return w if global_scale is None else w * wide(global_scale)


def beside(table: Array, weight: Array) -> Array:
    """A table or permutation (..., W), its stack cut as that of the weight, on an Explicit mesh."""
    cut = jax.typeof(weight).sharding
    spec = PartitionSpec(*cut.spec[: table.ndim - 1], None)
    return jax.sharding.reshard(table, NamedSharding(cut.mesh, spec))


def _look_up(codebook, codes):
    if is_explicit(codes):
        codebook = beside(codebook, codes)
        if codebook.ndim > 1:
            return jax.vmap(_look_up)(codebook, codes)
        return codebook.at[codes].get(out_sharding=jax.typeof(codes).sharding)
    if codebook.ndim == 1:
        return codebook[codes]
    stack = prod(codebook.shape[:-1])
    rows = jax.vmap(lambda c, q: c[q])(codebook.reshape(stack, -1), codes.reshape(stack, -1))
    return rows.reshape(codes.shape)


def whole_words(packed: Array) -> Array:
    """Words as they are, float8 codes (..., K) padded to words, as kernels take both."""
    if packed.dtype not in FLOAT8 or packed.shape[-1] % 4 == 0:
        return packed
    # As bytes: XLA on a CPU takes five times as long for floats.
    codes = jax.lax.bitcast_convert_type(packed, np.uint8)
    return jax.lax.bitcast_convert_type(pad_last(codes, -codes.shape[-1] % 4), packed.dtype)


def spread(parameter, *, ndim, group, k, dtype=jnp.float32):
    """A parameter of shape (...,), (..., N) or (..., N, G) that broadcasts against (..., N, K)."""
    p = jnp.asarray(parameter).astype(dtype)
    p = p.reshape(*p.shape, *(1,) * (ndim - p.ndim))
    if p.shape[-1] == 1 or group is None:
        return p
    wide = jnp.broadcast_to(p[..., None], (*p.shape, group))
    return wide.reshape(*p.shape[:-1], p.shape[-1] * group)[..., :k]
