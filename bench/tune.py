"""Which kernel of the table is the fastest for a problem, and which one the table chooses."""

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from bench import systems
from bench.native import Native
from bench.timing import Plan
from jaxgemv._ffi import backends


def tune(system: systems.System, n: int, k: int, dtype: str, rows: list[int], plan: Plan, native: Native):
    """For each M: (M, {kernel: us or None}, us of the table's choice). Each alone, in a captured graph."""
    weight_bytes = sum(a.nbytes for a in jax.tree.leaves(system.weights(0, n=n, k=k, dtype=dtype)))
    weights = plan.sequence(
        [system.weights(seed, n=n, k=k, dtype=dtype) for seed in range(plan.copies(weight_bytes))]
    )
    bits = weights[0].bits
    names = dict.fromkeys(row.name for row in backends["cuda"].kernels if (row.bits, row.x) == (bits, dtype))
    for m in rows:
        x = jax.device_put(np.random.default_rng(0).standard_normal((m, k)).astype(jnp.dtype(dtype)))
        y = jax.device_put(np.zeros((m, n), x.dtype))
        times = {name: native.product_us(x, weights, y, plan.repeats, name) for name in names}
        yield m, times, native.product_us(x, weights, y, plan.repeats)


def table(results: list) -> Table:
    """results: (N, K, dtype, format, M, times, us of the choice)"""
    names = list(dict.fromkeys(name for *_, times, _ in results for name in times))
    out = Table(title="us by kernel, alone in a captured graph; * is the fastest", title_justify="left")
    for name in ("N x K", "M", "x", "weights", *names, "chosen"):
        out.add_column(name, no_wrap=True, justify="right" if name in names else "left")
    for n, k, dtype, format, m, times, chosen in results:
        known = {name: us for name, us in times.items() if us is not None}
        best = min(known, key=known.get)
        # The choice is known by its time, so it can only be told apart from a kernel that is not as fast.
        nearest = min(known, key=lambda name: abs(known[name] - chosen))
        cells = [f"{known[name]:.2f}" + "*" * (name == best) if name in known else "" for name in names]
        out.add_row(f"{n} x {k}", str(m), dtype, format, *cells, f"{chosen:.2f} ({nearest})")
    return out
