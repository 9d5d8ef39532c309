"""Attention of one token on a GPU, and all that lies between two products: norms and rope of q and k, the cache.

One kernel, written in Pallas for Triton, where XLA has six. A program has one head, or all that share keys, and some of
the positions; where several have those of a head, a second kernel puts their results together.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # jax 0.11 says that it will go
    triton = None

NOTHING = -1e30  # the score of a position that is not seen
TILE = 16  # rows of q that the tensor cores take at least


def takes(cache):
    """Whether the kernel is for such keys and values: Triton wants powers of two."""
    width = cache[0].shape[-1]
    return triton is not None and width >= 32 and width & (width - 1) == 0


@functools.partial(jax.jit, static_argnames=("config", "window", "interpret"))  # traced once for all layers
def attend(y, norms, cache, positions, turn, config, window=0, interpret=False):
    """What model.attend_all gives for the one token of y (1, heads + 2 kv_heads, D)."""
    kv_heads, size, width = cache[0].shape
    # Tuned on an H200, one to 16 sequences, 256 to 4224 positions, heads of 64 to 256 (docs/decode-notes.md): by sums
    # where one block of a head has all, so that there is one kernel, else by tensor cores.
    if size <= 256 and width < 128 and config.sequences * config.n_heads <= 128:
        programs, rows, block, warps, stages, splits = config.n_heads, 1, 256, 8, 2, 1
    else:
        programs, rows, warps = kv_heads, max(TILE, pl.next_power_of_2(config.n_heads // kv_heads)), 4
        all_programs = programs * config.sequences
        block, stages, least = (64, 2, 64) if all_programs < 128 else (32, 3, 256)
        block = min(block, 32768 // (width * cache[0].dtype.itemsize))  # of shared memory
        splits = max(1, min(size // least, 512 // all_programs, 64))
    parts, weights, *cache = pl.pallas_call(
        functools.partial(
            _kernel, config=config, window=window, rows=rows, block=block, has_norms=bool(norms)
        ),
        grid=(programs, splits),
        out_shape=(
            jax.ShapeDtypeStruct((splits, config.n_heads, width), y.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, config.n_heads), jnp.float32),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in cache),
        ),
        input_output_aliases={4: 2, 5: 3},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="attend_one_token",
    )(positions, y[0], *(part[0, 0] for part in turn), *cache, *norms)
    if splits > 1:
        parts = pl.pallas_call(
            _mix,
            grid=(config.n_heads,),
            out_shape=jax.ShapeDtypeStruct(parts.shape[1:], y.dtype),
            interpret=interpret,
            name="mix_splits",
        )(parts, weights)
    return parts.reshape(1, -1), tuple(cache)


def _kernel(position_ref, y_ref, cos_ref, sin_ref, *refs, config, window, rows, block, has_norms):
    """y_ref: queries, keys and values. Of a split of the positions: the mean of v, the logarithm of its weight."""
    norm_refs, (out_ref, weight_ref, k_ref, v_ref) = refs[2 : 2 + 2 * has_norms], refs[-4:]
    kv_heads, _, width = k_ref.shape
    heads, half, group = config.n_heads, width // 2, config.n_heads // kv_heads
    program, split, splits = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    kv = program // group if rows == 1 else program
    here = jnp.arange(rows)
    head, is_head = (kv * group + here, here < group) if rows > 1 else (program + here, here < 1)
    i, position = jnp.arange(width), position_ref[0]
    cos, sin = (triton.load(ref.at[i % half]) for ref in (cos_ref, sin_ref))

    def rotated(head, is_head, norm):
        """Rows of y_ref, with norm and rope, of which those of is_head are there."""

        def load(j):
            place = j % half * 2 + j // half if config.rope_interleaved else j
            x = triton.load(y_ref.at[head[:, None], place[None]], mask=is_head[:, None] & (j >= 0), other=0)
            return x.astype(jnp.float32), triton.load(norm.at[place]) if has_norms else 1.0

        (x, of_x), (pair, of_pair) = load(i), load((i + half) % width)
        y = x * of_x * cos + jnp.where(i < half, -1.0, 1.0) * (pair * of_pair * sin)
        if has_norms:
            y *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.eps)
        return y

    q_norm, k_norm = norm_refs if has_norms else (None, None)
    first = jnp.maximum(position + 1 - window, 0) if window else 0
    begin, end = first // block + split, pl.cdiv(position, block)

    def add(n, state):
        """Online softmax: the largest score of each row, the sum of weights, and of weights times v."""
        at = (begin + n * splits) * block + jnp.arange(block)
        inside = (at >= first) & (at < position)
        place, there = (kv, at[:, None], i[None]), inside[:, None] & (i >= 0)
        k, v = (triton.load(ref.at[place], mask=there, other=0) for ref in (k_ref, v_ref))
        most, count, total = state
        scores = jnp.where(inside[None], _times_keys(q, k), NOTHING)
        now = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, shrink = jnp.where(inside[None], jnp.exp(scores - now[:, None]), 0), jnp.exp(most - now)
        count, total = count * shrink, total * shrink[:, None]
        return now, count + jnp.sum(weights, axis=1), total + _times_values(weights, v)

    q = rotated(head, is_head, q_norm) * (config.query_scalar or width) ** -0.5
    one = jnp.arange(1)
    k_now = rotated(heads + kv + one, one == 0, k_norm).astype(k_ref.dtype)
    v_now = triton.load(y_ref.at[heads + kv_heads + kv, i]).astype(v_ref.dtype)

    @pl.when((split == 0) & (program % group == 0 if rows == 1 else True))
    def _():
        triton.store(k_ref.at[kv, position, i], k_now[0])
        triton.store(v_ref.at[kv, position, i], v_now)

    # The token itself is not read from the cache, where the program of another head may write it.
    score = jnp.where(split == 0, jnp.sum(q * k_now.astype(jnp.float32), axis=1), NOTHING)
    count = jnp.where(split == 0, jnp.ones_like(score), 0.0)
    total = jnp.where(split == 0, jnp.broadcast_to(v_now.astype(jnp.float32), q.shape), 0.0)
    blocks = pl.cdiv(end - begin, splits)
    most, count, total = jax.lax.fori_loop(0, blocks, add, (score, count, total))
    count = jnp.maximum(count, 1e-30)  # a split without positions
    mean = (total / count[:, None]).astype(out_ref.dtype)
    triton.store(out_ref.at[split, head[:, None], i[None]], mean, mask=is_head[:, None] & (i >= 0))
    triton.store(weight_ref.at[split, head], most + jnp.log(count), mask=is_head)


def _mix(parts_ref, weights_ref, out_ref):
    """The splits of one head, as `_kernel` gives them, together: XLA has three kernels for it."""
    splits, _, width = parts_ref.shape
    head, split, i = pl.program_id(0), jnp.arange(pl.next_power_of_2(splits)), jnp.arange(width)
    there = split < splits
    weights = triton.load(weights_ref.at[split, head], mask=there, other=NOTHING)
    place = split[:, None], head, i[None]
    parts = triton.load(parts_ref.at[place], mask=there[:, None] & (i >= 0), other=0)
    weights = jnp.exp(weights - jnp.max(weights))
    mixed = jnp.sum(weights[:, None] * parts, axis=0) / jnp.sum(weights)
    triton.store(out_ref.at[head, i], mixed.astype(out_ref.dtype))


def _times_keys(q, k):
    """q (rows, D) times k (positions, D): by sums for one row, else by tensor cores, in k's type."""
    if len(q) == 1:
        return jnp.sum(q * k.astype(jnp.float32), axis=1).reshape(1, -1)
    return _dot(q, k, 1)


def _times_values(weights, v):
    """weights (rows, positions) times v (positions, D), likewise."""
    if len(weights) == 1:
        return jnp.sum(weights.reshape(-1, 1) * v.astype(jnp.float32), axis=0).reshape(1, -1)
    return _dot(weights, v, 0)


def _dot(a, b, axis):
    exact = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dimensions = ((1,), (axis,)), ((), ())
    a = a.astype(b.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
