"""How a JAX system is measured: its weights made, its result checked, its time taken inside jit."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import systems, timing
from bench.native import Native


class Setup(NamedTuple):
    """What all measurements of a run have in common."""

    platform: str
    plan: timing.Plan
    native: Native | None


class Measured(NamedTuple):
    rows: int  # of x: M
    nbytes: int  # weight, x and y, each counted once
    sample: timing.Sample | None  # inside jit
    kernel_us: float | None  # of a library that is not JAX's: in a captured graph
    error: float  # ||y - ref|| / ||ref||
    note: str | None = None  # why this is not a kernel's time


def make_copies(system: systems.System, n: int, k: int, dtype: str, plan: timing.Plan) -> tuple[int, list]:
    """(bytes of one copy of the weight, the copies)"""
    make = partial(system.weights, n=n, k=k, dtype=dtype)
    weight_bytes = sum(map(nbytes, jax.tree.leaves(jax.eval_shape(make, 0))))
    return weight_bytes, [make(seed) for seed in range(plan.copies(weight_bytes))]


def measure(
    system: systems.System, n: int, k: int, dtype: str, rows: list[int], setup: Setup
) -> Iterator[Measured]:
    """One measurement for each number of rows of x, all with the same weights."""
    weight_bytes, copies = make_copies(system, n, k, dtype, setup.plan)
    xs = np.random.default_rng(0).standard_normal((max(rows), k), np.float32).astype(jnp.dtype(dtype))
    expected = np.asarray(product(xs.astype(np.float32), systems.dense(setup.plan.sequence(copies)[-1])))
    implementation = {"gpu": "cuda"}.get(setup.platform, setup.platform)
    for m in rows:
        x = jax.device_put(xs[:m])
        if setup.native:
            y, sample = timing.measure_on_device(system.product, x, copies, setup.plan, setup.native)
        else:
            feed = setup.platform == "cpu"
            y, sample = timing.measure_on_host(system.product, x, copies, setup.plan, feed=feed)
        yield Measured(
            rows=m,
            nbytes=weight_bytes + x.nbytes + m * n * x.dtype.itemsize,
            sample=sample,
            kernel_us=None,
            error=relative_error(y, expected[:m]),
            note=systems.without_kernel(system, n, k, m, dtype, implementation),
        )


@jax.jit
def product(x, w):
    """x @ w.T, as exactly as float32 can."""
    return jnp.dot(x, w.T, precision="highest")


def relative_error(y, expected: np.ndarray) -> float:
    difference = np.asarray(y).astype(np.float32) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def nbytes(a) -> int:
    """Of an array whose elements may be less than a byte."""
    bits = jnp.iinfo(a.dtype).bits if jnp.issubdtype(a.dtype, jnp.integer) else 8 * a.dtype.itemsize
    return a.size * bits // 8
