"""How long it takes to put rows of one expert side by side: by comparing all ids with all, and by sorting them.

- `python -m bench.routing`: where the two cross is `_COMPARED` in jaxgemv/_grouped.py
"""

import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from bench import arguments
from jaxgemv import _grouped

_EXPERTS, _TILE, _CHAIN, _REPEATS = 8, 16, 20, 5


def main() -> None:
    arguments.parse(arguments.parser("bench.routing", __doc__, saves=False))
    out = Table(title=f"us on {jax.devices()[0].device_kind}, {_EXPERTS} experts", title_justify="left")
    for name in ("ids", "comparing", "sorting"):
        out.add_column(name, justify="right")
    for batch in (64, 512, 2048, 4096, 8192, 16384):
        times = (_time(route, batch) for route in (_grouped._by_comparing, _grouped._by_sorting))
        out.add_row(str(batch), *(f"{us:.1f}" for us in times))
    Console().print(out)


def _time(route, batch: int) -> float:
    """Of one routing in a loop of them, each with ids that need the last one's slots."""
    slots = _grouped._tiles(batch, _EXPERTS, _TILE) * _TILE
    ids = jax.random.randint(jax.random.key(0), (batch,), 0, _EXPERTS, jnp.int32)

    @jax.jit
    def run(ids):
        def step(_, ids):
            slot, source = route(ids, _EXPERTS, _TILE, slots)
            return (ids + slot[::-1] + source[:batch]) % _EXPERTS

        return jax.lax.fori_loop(0, _CHAIN, step, ids)

    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(ids))
        times.append(1e6 * (time.perf_counter() - start) / _CHAIN)
    return statistics.median(times)


if __name__ == "__main__":
    main()
