"""How the kernels of the table compare on a problem, and which of them is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from bench import systems
from bench.measure import make_copies
from bench.native import Native
from bench.timing import Plan
from jaxgemv._ffi import backends


def tune(system: systems.System, n: int, k: int, dtype: str, rows: list[int], plan: Plan, native: Native):
    """For each M: (M, {kernel: us}), those that support the problem, and first the chosen one.

    Each is timed alone, in a captured graph.
    """
    weights = plan.sequence(make_copies(system, n, k, dtype, plan)[1])
    kernel = (weights[0].bits, dtype)
    rows_of_table = (row for row in backends["cuda"].kernels if not row.transposed)
    names = dict.fromkeys(row.name for row in rows_of_table if (row.bits, row.x) == kernel)
    for m in rows:
        x = jax.device_put(np.random.default_rng(0).standard_normal((m, k)).astype(jnp.dtype(dtype)))
        y = jax.device_put(np.zeros((m, n), x.dtype))
        times = {name: native.product_us(x, weights, y, plan.repeats, name) for name in names}
        native.product_us(x, weights, y, 1)
        chosen = native.last_kernel()
        yield m, {chosen: times[chosen]} | {name: us for name, us in times.items() if us is not None}


def table(results: list) -> Table:
    """results: (N, K, dtype, format, M, {kernel: us})"""
    names = list(dict.fromkeys(name for *_, times in results for name in times))
    out = Table(title="us by kernel, alone in a captured graph; * is the fastest", title_justify="left")
    for name in ("N x K", "M", "x", "weights", *names, "chosen"):
        out.add_column(name, no_wrap=True, justify="right" if name in names else "left")
    for n, k, dtype, format, m, times in results:
        best = min(times, key=times.get)
        cells = [f"{times[name]:.2f}" + "*" * (name == best) if name in times else "" for name in names]
        out.add_row(f"{n} x {k}", str(m), dtype, format, *cells, next(iter(times)))
    return out
