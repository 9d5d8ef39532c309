"""The one tolerance of the tests, elementwise, derived from dtype and K.

A kernel may compute `sum_k x (q - zero) scale`, or `scale * sum_k x q + offset * sum_k x` a group at a time, in any
order, with products and sums rounded to float32 (unit roundoff u = 2^-24). Whichever it does, each rounding is at
most u times

    magnitude = sum_k |x_k| (|q_k| |scale| + |zero scale| or |offset|) + |bias|

and no value passes through more than n = K + 8 roundings: K additions, and 8 for shift, products, group and bias.
In the worst case they add up to n u. For long sums that bound would hide a wrong code, so we take the bound of
Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019): lambda sqrt(n) u, which holds with
probability 1 - 2 exp(-lambda^2 / 2). At lambda = 6 one element in 3e7 may miss it, and the data is seeded.
The result is then rounded once to its own dtype.

With more than 64 rows each weight may first be rounded to 16 bits: `rounded` is what that adds.
"""

import jax
import jax.numpy as jnp
import numpy as np

_LAMBDA = 6
_U = 2.0**-24
_CONTRACT = 2.0**-20


def tolerance(
    exact: np.ndarray, magnitude: np.ndarray, k: int, dtype, *, worst: bool = False, contract: bool = False
) -> np.ndarray:
    """How far a result of `dtype` may lie from the float64 result `exact`.

    `worst`: the bound without luck, n u. `contract`: what we promise of float32 up to 64 rows, whatever K is.
    """
    n = k + 8
    error = (n if worst else min(n, _LAMBDA * np.sqrt(n))) * _U * magnitude
    if contract:
        error = _CONTRACT * magnitude
    out = jnp.finfo(dtype)
    return error + (np.abs(exact) + error) * float(out.eps) / 2 + float(out.smallest_subnormal)


def significand(dtype):
    """The dtype whose significand a rounded weight has: float32 is TF32, which has that of float16."""
    return jnp.dtype(jnp.float16 if dtype == jnp.float32 else dtype)


def rounded(x: np.ndarray, weight: np.ndarray, dtype) -> np.ndarray:
    """How far x (..., K) times weight (N, K) may move where each weight is rounded to `dtype` once.

    These errors are independent and of either sign, each at most half a unit: Hoeffding's bound, at the same lambda.
    For x that is rounded too, normalised or to TF32, it is twice that.
    """
    kind = jnp.finfo(significand(dtype))
    each = np.abs(weight) * float(kind.eps) / 2 + float(kind.smallest_subnormal) / 2
    return _LAMBDA * np.sqrt(np.square(np.asarray(x, np.float64)) @ np.square(each).T)


def held(x: np.ndarray, scale: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """How far x (..., K) times weights of scale (N, K) may move where entries are held to 2^-14 of the largest.

    The errors of entries meet x of either sign: the bound of `rounded`.
    """
    each = np.abs(scale) * float(np.abs(codebook.astype(np.float64)).max()) * 2.0**-14
    return _LAMBDA * np.sqrt(np.square(np.asarray(x, np.float64)) @ np.square(each).T)


def assert_close(
    y,
    exact: np.ndarray,
    magnitude: np.ndarray,
    k: int,
    *,
    dtype,
    factor: int = 1,
    worst: bool = False,
    contract: bool = False,
    more: np.ndarray | float = 0.0,
) -> None:
    """`factor` 2: two results that may each err; `worst`: errors that do not average out; `more` adds up."""
    assert y.dtype == dtype
    assert y.shape == exact.shape
    error = np.abs(np.asarray(y, np.float64) - exact)
    allowed = factor * tolerance(exact, magnitude, k, dtype, worst=worst, contract=contract) + more
    bad = ~(error <= allowed)  # also where error is NaN
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, error / allowed, 0)), error.shape)
        raise AssertionError(
            f"{bad.sum()} of {bad.size} elements are off; at {tuple(map(int, at))} got {y[at]}, expected {exact[at]}"
            f" +- {allowed[at]}"
        )


def assert_equal(a, b) -> None:
    """Two pytrees alike to the bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
