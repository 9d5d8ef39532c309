"""What we aim at, product by product: its time over the read floor or over XLA's dense product, beside a bar.

- `python -m bench.bars --out FILE`: all of them, and which are met
- `python -m bench.bars --of FILE`: the table of an earlier run, in Markdown
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import jax
from rich.table import Table

from bench import arguments, environment, grid, report
from bench.grid_cells import Cell
from bench.grid_report import Row, weights_text

_FLOOR, _DENSE = "floor", "dense"  # what a time is measured by
_COLUMNS = "N x K", "M", "x", "weights", "kernel", "us", "floor us", "dense us", "is", "bar"
_BASE = Cell("bfloat16", "int4", 128, "zero", "16-bit", 1, (28672, 4096))
# What differs from _BASE, every combination of it, and the bars of the last dimension's values.
_BARS = {
    "gpu": (
        (
            _FLOOR,
            {"shape": {(28672, 4096): 1.12, (8192, 8192): 1.12, (4096, 14336): 1.12, (28672, 8192): 1.12}},
        ),
        (
            _FLOOR,
            {"shape": {(128256, 4096): 1.12, (4096, 4096): 1.25, (151936, 896): 1.3, (7168, 2048): 1.4}},
        ),
        (_FLOOR, {"rows": {8: 1.25, 16: 1.3, 32: 1.45, 64: 1.8}}),
        (_FLOOR, {"shape": [(4096, 14336)], "rows": {8: 1.5, 16: 1.6, 32: 1.8, 64: 2.3}}),
        (_FLOOR, {"shape": [(4096, 4096)], "rows": {16: 1.8, 64: 2.9}}),
        (
            _FLOOR,
            {"dtype": ["float32"], "shape": dict.fromkeys([(28672, 4096), (4096, 14336), (4096, 4096)], 1.4)},
        ),
        (_FLOOR, {"format": {"int1": 1.5, "int2": 1.25, "int3": 1.3, "int5": 1.3, "int6": 1.3, "int7": 1.5}}),
        (_FLOOR, {"group": {32: 1.4, 256: 1.15, 512: 1.15, None: 1.15}}),
        (_FLOOR, {"shift": {"offset": 1.2}}),
        (_FLOOR, {"scale": {"float32": 1.3}}),
        (_FLOOR, {"shape": [(4099, 4099)], "group": {128: 2, None: 2}}),
        (_DENSE, {"shape": dict.fromkeys([(896, 896), (1024, 1024), (2048, 2048)], 1)}),
        (_FLOOR, {"group": [64], "format": ["nf4", "fp4"], "scale": {"16-bit": 1.35, "float32": 1.35}}),
        (_FLOOR, {"format": {"iq4_nl": 1.35, "mxfp4": 1.3, "nvfp4": 1.4, "mxfp8": 1.25}}),
        (_FLOOR, {"group": [None], "format": {"fp8": 1.15}}),
        (_FLOOR, {"group": [64], "rows": [16], "format": {"nf4": 1.5, "fp4": 1.5}}),
        (_FLOOR, {"rows": [16], "format": {"iq4_nl": 1.5, "mxfp4": 1.5, "nvfp4": 1.5, "mxfp8": 1.5}}),
        (_FLOOR, {"group": [None], "rows": [16], "format": {"fp8": 1.5}}),
        (
            _DENSE,
            {
                "shape": [(28672, 4096), (4096, 4096)],
                "rows": {65: 1.2, 128: 1.2, 512: 1.2, 1024: 1.2, 2048: 1.1},
            },
        ),
    ),
    "cpu": (
        (_FLOOR, {"shape": [(4096, 4096)], "group": {32: 1.5}}),
        (_FLOOR, {"shape": [(4096, 4096)], "group": [64], "format": {"nf4": 1.5, "fp4": 1.5}}),
        (
            _FLOOR,
            {"shape": [(4096, 4096)], "format": {"iq4_nl": 1.5, "mxfp4": 1.5, "nvfp4": 1.6, "mxfp8": 1.4}},
        ),
        (_FLOOR, {"shape": [(4096, 4096)], "group": [None], "format": {"fp8": 1.2}}),
    ),
}


@dataclass
class Result(Row):
    """A product's times, and what they are to be."""

    of: str = _FLOOR
    bar: float = 0

    @property
    def value(self) -> float | None:
        return self.over_floor if self.of == _FLOOR else self.ratio

    @property
    def met(self) -> bool:
        return self.value is not None and round(self.value, 2) <= self.bar


def bars(platform: str) -> Iterator[tuple[Cell, str, float]]:
    """Each product, with what its time is measured by and how much of that it may be."""
    for of, changes in _BARS[platform]:
        for values in product(*changes.values()):
            *_, last = changes.values()
            yield _BASE._replace(**dict(zip(changes, values))), of, last[values[-1]]


def texts(r: Result) -> tuple[str, ...]:
    numbers = (f"{number:.1f}" if number else "" for number in (r.us, r.floor_us, r.dense_us))
    value = f"{r.value:.2f} of {r.of}" if r.value else r.note or ""
    verdict = "met" if r.met else "missed"
    name = weights_text(r).replace(", scale 16-bit", "")
    return (
        f"{r.n} x {r.k}",
        str(r.rows),
        r.dtype,
        name,
        r.kernel or "",
        *numbers,
        value,
        f"{r.bar:g}, {verdict}",
    )


def markdown(results: list[Result]) -> str:
    lines = _COLUMNS, ["---"] * len(_COLUMNS), *map(texts, results)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = arguments.parser("bench.bars", __doc__)
    parser.add_argument("--of", type=Path, metavar="FILE", help="times that were measured before")
    args = arguments.parse(parser)
    if args.of:
        print(markdown(arguments.saved("bench.bars", args.of, Result)["rows"]))
        return
    device = jax.devices()[0]
    # Products of the same shape and type of x share XLA's dense one.
    wanted = sorted(bars(device.platform), key=lambda each: (each[0].shape, each[0].dtype, each[0].rows))
    cells = [cell for cell, _, _ in wanted]
    with report.progress() as progress:
        rows, method = grid.run(device, cells, progress, progress.add_task("", total=len(cells)))
    results = [Result(**asdict(row), of=of, bar=bar) for row, (_, of, bar) in zip(rows, wanted)]
    out = Table(title=f"{device.device_kind}: {sum(r.met for r in results)} of {len(results)} met")
    for name in _COLUMNS:
        out.add_column(name, no_wrap=True)
    for result in results:
        out.add_row(*texts(result))
    report.console().print(out)
    if args.out:
        report.save(args.out, environment.environment(device, args.commit, "bench.bars"), method, results)


if __name__ == "__main__":
    main()
