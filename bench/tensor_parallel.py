"""Times the two products of a feed-forward layer, y = down(silu(up(x))), on one GPU and cut over several.

- `python -m bench.tensor_parallel --out FILE`: int4 and bf16 weights on 1, 2, 4, ... of the GPUs there are
- `python -m bench.tensor_parallel --devices 2 --rows 1,16,64`: on one and two; more rows of x
- `python -m bench.tensor_parallel --platform cpu --devices 8 --quick`: a small layer on virtual devices, to try it out

up is cut by its outputs, down by its inputs, which takes one all-reduce of y. Many pairs make one jit program, each on
the next copy of the weights and on an x that needs the y before it. Several GPUs have no clock in common: the time is
that of the host for the whole program.
"""

import argparse
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxgemv
from bench import arguments, environment, measure, report, systems, timing

LAYER, QUICK_LAYER = (28672, 8192), (2048, 1024)  # Llama 3 70B; N x K of up, K x N of down
PLANS = {  # bytes are those of one device
    "gpu": timing.Plan(rotate=400e6, copies_range=(2, 32), calls=64, memory=16e9, repeats=15, executions=24),
    "cpu": timing.Plan(rotate=64e6, copies_range=(2, 16), calls=4, memory=2e9, repeats=7, executions=1),
}
SYSTEMS = [s for s in systems.SYSTEMS if (s.name, s.format) in {("jaxgemv", "int4 g128"), ("XLA", "bf16")}]


@dataclass
class Row:
    n: int  # up is (n, k), down (k, n)
    k: int
    rows: int  # of x: M
    dtype: str  # of x
    format: str
    system: str
    devices: int
    us: float  # one pair
    spread: float
    enqueue_us: float | None
    calls: int  # pairs in one program
    nbytes: int  # both weights, on all devices together
    gb_per_s: float  # of one device
    collectives: dict[str, int]  # in the program of a single pair
    error: float  # ||y - ref|| / ||ref||, ref in float32 on one device
    speedup: float | None = None  # over one device


def main() -> None:
    args = _arguments()
    if args.platform:
        jax.config.update("jax_platforms", args.platform)
    if args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", args.devices or 8)
    devices = jax.devices()
    plan = PLANS[devices[0].platform]
    if args.quick:
        plan = plan._replace(repeats=5, calls=4)
    counts = [c for c in (1, 2, 4, 8, 16) if c <= min(len(devices), args.devices or len(devices))]
    cells = [
        (system, dtype)
        for system in SYSTEMS
        for dtype in system.dtypes[devices[0].platform]
        if args.dtypes is None or dtype in args.dtypes
    ]
    n, k = QUICK_LAYER if args.quick else LAYER

    console = Console(width=None if Console().is_terminal else 160)
    rows: list[Row] = []
    with report.progress() as progress:
        task = progress.add_task("", total=len(cells) * len(counts) * len(args.rows))
        for system, dtype in cells:
            weights = Weights(system, n, k, dtype, max(args.rows), plan)
            for count in counts:
                progress.update(
                    task, description=f"{system.name} {system.format}, x {dtype}, {count} devices"
                )
                for row in _measure(weights, devices[:count], args.rows, plan):
                    rows.append(row)
                    progress.advance(task)
    _compare(rows)
    env = environment.environment(devices[0], args.commit, "bench.tensor_parallel")
    env |= {"devices": len(devices), "nccl": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}}
    console.print(_table(rows, env["device"]))
    if args.out:
        path = report.save(args.out, env, plan._asdict(), rows)
        console.print(f"saved to {path}", markup=False)


class Weights:
    """Copies of a layer's weights, rows of x, and what they should give."""

    def __init__(self, system: systems.System, n: int, k: int, dtype: str, rows: int, plan: timing.Plan):
        self.system, self.n, self.k, self.dtype, self.plan = system, n, k, dtype, plan
        self.x = np.random.default_rng(0).standard_normal((rows, k), np.float32).astype(jnp.dtype(dtype))
        first = self._make(0)
        self.nbytes = sum(map(measure.nbytes, jax.tree.leaves(first)))
        up, down = (systems.dense(w) for w in first)
        h = jax.nn.silu(measure.product(self.x.astype(np.float32), up))
        self.expected = np.asarray(measure.product(h, down))

    def _make(self, seed: int):
        make = partial(self.system.weights, dtype=self.dtype)
        return make(2 * seed, n=self.n, k=self.k), make(2 * seed + 1, n=self.k, k=self.n)

    def over(self, mesh: Mesh) -> list:
        """As many copies as it takes, up cut by rows and down by columns; parameters as their codes."""

        def put(w, *spec):
            # A parameter with no groups is of the outputs alone.
            return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), w)

        copies = []
        for seed in range(self.plan.copies(self.nbytes // mesh.size)):
            up, down = self._make(seed)
            copies.append(jax.block_until_ready((put(up, "model", None), put(down, None, "model"))))
        return copies


def _measure(weights: Weights, devices: list, rows: list[int], plan: timing.Plan):
    """One Row for each number of rows of x, all with the same copies of the weights."""
    mesh = Mesh(np.array(devices), ("model",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    product = weights.system.product

    def pair(x, w):
        up, down = w
        return jax.lax.with_sharding_constraint(product(jax.nn.silu(product(x, up)), down), whole)

    copies = weights.over(mesh)
    for m in rows:
        x = jax.device_put(weights.x[:m], whole)
        alone = jax.jit(pair).lower(x, copies[0]).compile()
        error = measure.relative_error(alone(x, copies[0]), weights.expected[:m])
        _, sample = timing.measure_on_host(pair, x, copies, plan, feed=True)
        yield Row(
            n=weights.n,
            k=weights.k,
            rows=m,
            dtype=weights.dtype,
            format=weights.system.format,
            system=weights.system.name,
            devices=len(devices),
            **sample._asdict(),
            nbytes=weights.nbytes,
            gb_per_s=weights.nbytes / len(devices) / sample.us / 1e3,
            collectives=_collectives(alone.as_text()),
            error=error,
        )


def _collectives(program: str) -> dict[str, int]:
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return dict(Counter(re.findall(rf" ({names})(?:-start)?\(", program)))


def _compare(rows: list[Row]) -> None:
    def key(r):
        return r.rows, r.dtype, r.format, r.system

    alone = {key(r): r.us for r in rows if r.devices == 1}
    for r in rows:
        r.speedup = alone[key(r)] / r.us
    rows.sort(key=lambda r: r.rows)


def _table(rows: list[Row], device: str) -> Table:
    title = f"{rows[0].n} x {rows[0].k} and back on {device}, jaxgemv {jaxgemv.__version__}, jax {jax.__version__}"
    out = Table(title=title, title_justify="left")
    for name in ("M", "x", "weights", "system"):
        out.add_column(name, no_wrap=True)
    for name in ("devices", "us", "±%", "GB/s each", "x 1 device", "collectives", "err"):
        out.add_column(name, justify="right", no_wrap=True)
    kind = None
    for r in rows:
        if kind != (kind := (r.rows, r.dtype, r.format)):
            out.add_section()
        sent = ", ".join(f"{count} {name}" for name, count in r.collectives.items())
        numbers = f"{r.us:.1f}", f"{100 * r.spread:.1f}", f"{r.gb_per_s:.0f}", f"{r.speedup:.2f}"
        out.add_row(
            str(r.rows),
            r.dtype,
            r.format,
            r.system,
            str(r.devices),
            *numbers,
            sent,
            report.error_text(r.error),
        )
    return out


def _arguments():
    parser = argparse.ArgumentParser(
        prog="python -m bench.tensor_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="at most (default: all; 8 virtual ones on a CPU)"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's")
    parser.add_argument("--quick", action="store_true", help="a small layer, few repeats")
    parser.add_argument(
        "--rows", type=arguments.numbers, default=[1, 16], metavar="M,...", help="rows of x (default: 1,16)"
    )
    parser.add_argument("--dtypes", type=partial(str.split, sep=","), metavar="NAME,...", help="of x")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON to FILE")
    parser.add_argument("--commit", help="recorded in the JSON (default: $JAXGEMV_COMMIT, or git's HEAD)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
