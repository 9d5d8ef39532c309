"""What a call takes that has next to nothing to do: int4 at 256 x 256, one row of float32, beside XLA's own product.

- `python -m bench.calls --platform cpu`
"""

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bench import arguments, environment, report
from jaxgemv import gemv, quantize

_SIZE, _CHAIN, _REPEATS = 256, 100, 500


@dataclass
class Row:
    system: str
    in_jit_us: float
    outside_us: float


def main() -> None:
    parser = arguments.parser("bench.calls", __doc__)
    args = arguments.parse(parser)

    # Orthogonal, so that a chain of products neither grows nor vanishes.
    dense = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (_SIZE, _SIZE)))[0]
    weights = {"jaxgemv int4 g128": quantize(dense, bits=4, group_size=128), "XLA f32": dense}
    rows = []
    for name, w in weights.items():
        product = gemv if name.startswith("jaxgemv") else lambda x, w: x @ w
        # The difference is that of calls alone, without what one execution takes.
        one, chain = (_time(jax.jit(_chain(product, n)), w) for n in (1, 1 + _CHAIN))
        row = Row(name, (chain - one) / _CHAIN, _time(product, w))
        rows.append(row)
        print(f"{name}: {row.in_jit_us:.1f} us in jit, {row.outside_us:.1f} us outside")
    if args.out:
        env = environment.environment(jax.devices()[0], args.commit, "bench.calls")
        method = {"size": _SIZE, "chain": _CHAIN, "repeats": _REPEATS}
        report.save(args.out, env, method, rows)


def _chain(product, count: int):
    def run(x, w):
        for _ in range(count):
            x = product(x, w)
        return x

    return run


def _time(function, w) -> float:
    """Microseconds of function(x, w), the median."""
    x = jax.random.normal(jax.random.key(1), (1, _SIZE))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(x, w))
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
