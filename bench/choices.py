"""Is the fastest kernel chosen? Random products of the sizes that models have, by each kernel that can run them.

- `python -m bench.choices --count 600 --out FILE`: what is chosen, and what all kernels take (us, in jit, cold weights)
- `python -m bench.choices --of FILE`: what this checkout's `choose.h` would choose, by the times in FILE. It needs a
  C++ compiler and no GPU: so rules are fitted.
"""

import ctypes
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
from rich.table import Table

from bench import arguments, chain, environment, host_systems, native, report
from bench.grid import Grid, copies
from bench.grid_cells import DIMENSIONS, Cell, shape_only, weight
from bench.grid_cells import random as random_arrays
from bench.grid_report import Product, weights_text
from bench.measure import nbytes
from jaxgemv import _ffi, gemv
from jaxgemv._dispatch import format_of

# Widths of layers, and some that no kernel was made for.
_SIDES = [
    int(side)
    for side in """
    256 384 512 576 768 896 1024 1152 1280 1536 2048 2304 2560 2880 3072 3584 4096 4864 5120 5504 5760 6144 6912 8192
    8960 9216 11008 12288 13824 14336 17920 18944 22016 27648 28672 1000 1500 2056 3300 4099 7700
    """.split()
]
_ROWS = 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64
_CODES = {"gpu": (0.9 * 2**20, 2**26), "cpu": (2**16, 2**23)}  # of a weight: least, most
_REFERENCE = "simt"  # takes everything, slowly: not timed
# Above most_rows: kernels that take so many, and XLA's product with a weight that is written first.
_FOR_MANY, _WRITTEN = ("direct", "gemm", "gemm_tma"), "XLA"
_MISS = 1.05


@dataclass
class Choice(Product):
    """A product, the kernel chosen for it, and the time of every kernel that can run it."""

    chosen: str | None = None
    us: dict[str, float] = field(default_factory=dict)

    @property
    def regret(self) -> float:
        """The chosen kernel's time over the least."""
        return self.us[self.chosen] / min(self.us.values()) if self.chosen in self.us else math.nan


def cells(platform: str, count: int, seed: int, chosen: Mapping[str, Sequence | None]) -> Iterator[Cell]:
    """Random ones. chosen: values instead of those that a dimension has; as sides stand above, most weights are of a
    few million codes."""
    rng, (least, most) = random.Random(seed), _CODES[platform]
    dimensions = {**DIMENSIONS, "rows": _ROWS} | {name: values for name, values in chosen.items() if values}
    for _ in range(count):
        some = {name: rng.choice(values) for name, values in dimensions.items()}
        while "shape" not in some:
            shape = rng.choice(_SIDES), rng.choice(_SIDES)
            if least <= math.prod(shape) <= most:
                some["shape"] = shape
        yield Cell(**some)


@contextmanager
def _no_kernels(backend: str):
    """For more rows than `most_rows`, which is asked where a program is lowered."""
    table = _ffi.backends[backend]
    _ffi.backends[backend] = table._replace(weight_limits=lambda *_: _ffi.WeightLimits())
    try:
        yield
    finally:
        _ffi.backends[backend] = table


def measure(grid: Grid, backend: str, cell: Cell, pool) -> Choice:
    n, k = cell.shape
    choice = Choice(n, k, cell.rows, *cell.made[:5])
    w = weight(cell, shape_only)
    found = _ffi.backends[backend].find(cell.bits, cell.dtype, format=format_of(w))
    names = [name for name in dict.fromkeys(kernel.name for kernel in found) if name != _REFERENCE]
    x = jax.device_put(random_arrays(bits=0)("normal", (cell.rows, k), cell.dtype), grid.device)
    count = grid.plan.count(sum(map(nbytes, jax.tree.leaves(w))), cell.flops)
    submit = partial(pool.submit, chain.program, x=x, weights=[w] * count, scratch=grid.clock.scratch)
    is_many, kernel = cell.rows > _ffi.backends[backend].most_rows, gemv
    if is_many:
        names = [name for name in names if name in _FOR_MANY]
        kernel = partial(gemv, implementation=backend)
    # One each, since a CUDA graph keeps the kernel that it was recorded with.
    programs = [submit(each) for each in (gemv, *[kernel] * len(names))]
    wait(programs)
    if is_many:
        with _no_kernels(backend):
            names.append(_WRITTEN)
            programs.append(submit(gemv))
            wait(programs)
    weights = copies(weight(cell, random_arrays(cell.bits)), count)
    for name, program in zip(("", *names), [each.result() for each in programs]):
        _ffi.use_only(backend, "" if name == _WRITTEN else name)
        try:
            us = grid.time(program, x, weights, cell.dtype)[1].us
        except jax.errors.JaxRuntimeError:
            continue  # this kernel does not take the product
        finally:
            _ffi.use_only(backend, "")
        ran = grid.kernel(program)
        if not name:
            choice.chosen = ran
        if name in ("", ran, _WRITTEN):  # and not XLA's own product for few rows, which needs no kernel
            choice.us[ran] = min(us, choice.us.get(ran, math.inf))
    return choice


class Chooser:
    """`choose.h` of a backend, in a library of its own."""

    def __init__(self, backend: str):
        library, missing = native.load_chooser(backend)
        if library is None:
            raise SystemExit(f"bench.choices: {missing}")
        self._choose = library.jaxgemv_bench_choose

    def __call__(self, choice: Choice) -> str:
        cell = Cell(*(getattr(choice, name) for name in Cell._fields[:-1]), (choice.n, choice.k))
        numbers = (choice.n, choice.k, choice.rows, min(choice.group or choice.k, choice.k), cell.bits)
        texts = (choice.dtype, format_of(weight(cell, shape_only)), choice.shift, choice.scale, *choice.us)
        encoded = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        return list(choice.us)[self._choose((ctypes.c_int64 * 5)(*numbers), encoded, len(choice.us))]


def summary(choices: list[Choice]) -> dict:
    regrets = [choice.regret for choice in choices]
    return {
        "products": len(choices),
        "geometric_mean": statistics.geometric_mean(regrets),
        "missed": sum(regret > _MISS for regret in regrets),
        "worst": max(regrets),
    }


def table(choices: list[Choice]) -> Table:
    out = Table(title="chosen, but not the fastest; worst first", title_justify="left")
    for name in ("N x K", "M", "x", "weights", "chosen", "us"):
        out.add_column(name, no_wrap=True)
    for c in sorted(choices, key=lambda c: -c.regret):
        if c.regret > _MISS:
            others = ", ".join(f"{name} {c.us[name]:.1f}" for name in sorted(c.us, key=c.us.get))
            out.add_row(f"{c.n} x {c.k}", str(c.rows), c.dtype, weights_text(c), c.chosen, others)
    return out


def main() -> None:
    parser = arguments.parser("bench.choices", __doc__)
    parser.add_argument("--count", type=arguments.number, default=200, help="products (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", nargs="+", metavar="NxK", help="of these shapes only")
    parser.add_argument(
        "--rows", nargs="+", type=arguments.number, metavar="M", help="with so many rows of x"
    )
    names = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--formats", **names, choices=DIMENSIONS["format"], help="int4, nf4, mxfp4, ...")
    parser.add_argument("--dtypes", **names, choices=DIMENSIONS["dtype"], help="of x: float32, ...")
    parser.add_argument("--isa", help="on the CPU, avx2, say, instead of the best of the processor")
    parser.add_argument("--of", type=Path, metavar="FILE", help="times that were measured before")
    args = arguments.parse(parser)
    console = report.console()
    if args.of:
        saved = arguments.saved("bench.choices", args.of, Choice)
        choices = saved["rows"]
        choose = Chooser("cpu" if saved["environment"]["platform"] == "cpu" else "cuda")
        for choice in choices:
            choice.chosen = choose(choice)
    else:
        choices = _measured(args)
    if not choices:
        return
    console.print(table(choices))
    console.print(
        "{products} products: the kernel chosen takes {geometric_mean:.3f} times as long as the fastest on average, "
        "{missed} times more than 5% longer, {worst:.2f} at worst".format(**summary(choices))
    )


def _measured(args) -> list[Choice]:
    device = jax.devices()[0]
    backend = "cpu" if device.platform == "cpu" else "cuda"
    arguments.use_isa("bench.choices", args.isa)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes or ()]
    chosen = {"shape": shapes, "rows": args.rows, "format": args.formats, "dtype": args.dtypes}
    wanted = list(cells(device.platform, args.count, args.seed, chosen))
    choices = []
    with ThreadPoolExecutor(min(16, host_systems.THREADS)) as pool, report.progress() as progress:
        grid = Grid(device, wanted)
        try:
            for cell in progress.track(wanted, description="measuring"):
                choices.append(measure(grid, backend, cell, pool))
        except KeyboardInterrupt:
            pass  # what there is, is saved
    if args.out and choices:
        env = environment.environment(device, args.commit, "bench.choices")
        report.save(args.out, env, {**grid.method(), "seed": args.seed, "summary": summary(choices)}, choices)
    return choices


if __name__ == "__main__":
    main()
