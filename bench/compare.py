"""Two versions beside each other, from several results of each: did a change make a product slower?

- `python -m bench.compare --before a1.json a2.json ... --after b1.json b2.json ... --out FILE`

The results are those of `python -m bench --out`, made in turns, so that a machine that becomes slower does so for both.
Of each cell the medians are compared; for each format and dtype of x the geometric mean of their ratios; and the worst
cells, with in how many of the rounds the second was slower by so much.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import arguments

SLOWER = 1.05  # a cell worth a look


@dataclass
class Cell:
    n: int
    k: int
    rows: int
    dtype: str
    format: str
    before_us: float  # medians
    after_us: float
    ratio: float
    rounds: int
    slower: int  # rounds in which it was slower by more than SLOWER


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--after", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON to FILE")
    args = parser.parse_args()
    before, after = (
        [arguments.saved("bench.compare", file) for file in files] for files in (args.before, args.after)
    )
    cells = compare(before, after)
    if not cells:
        raise SystemExit("bench.compare: the results have no product of jaxgemv in common")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(means_table(cells))
    console.print(worst_table(cells))
    if args.out:
        content = {
            "environment": after[0]["environment"],
            "before": before[0]["environment"]["commit"],
            "after": after[0]["environment"]["commit"],
            "means": [{"format": f, "dtype": d, **m} for (f, d), m in means(cells).items()],
            "cells": [asdict(cell) for cell in cells],
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")


def compare(before: list[dict], after: list[dict]) -> list[Cell]:
    """One cell for each product of jaxgemv that both have."""
    first, second = _times(before), _times(after)
    cells = []
    for key in first.keys() & second.keys():
        ratios = [b / a for a, b in zip(first[key], second[key])]
        medians = [statistics.median(times[key]) for times in (first, second)]
        slower = sum(ratio > SLOWER for ratio in ratios)
        cells.append(Cell(*key, *medians, medians[1] / medians[0], len(ratios), slower))
    return sorted(cells, key=lambda cell: -cell.ratio)


def _times(results: list[dict]) -> dict[tuple, list[float]]:
    times = defaultdict(list)
    for result in results:
        for row in result["rows"]:
            if row["system"] == "jaxgemv" and row["us"]:
                times[tuple(row[name] for name in ("n", "k", "rows", "dtype", "format"))].append(row["us"])
    return times


def means(cells: list[Cell]) -> dict[tuple[str, str], dict]:
    groups = defaultdict(list)
    for cell in cells:
        groups[cell.format, cell.dtype].append(cell.ratio)
    return {
        key: {"cells": len(ratios), "ratio": statistics.geometric_mean(ratios)}
        for key, ratios in sorted(groups.items())
    }


def means_table(cells: list[Cell]) -> Table:
    out = Table(title="after / before, geometric means of the cells", title_justify="left")
    for name in ("format", "x", "cells", "ratio"):
        out.add_column(name, justify="right" if name in ("cells", "ratio") else "left")
    for (format, dtype), mean in means(cells).items():
        out.add_row(format, dtype, str(mean["cells"]), f"{mean['ratio']:.4f}")
    return out


def worst_table(cells: list[Cell]) -> Table:
    out = Table(title="the cells that became slowest", title_justify="left")
    for name in ("N x K", "M", "x", "format", "before, us", "after, us", "ratio", "rounds over 5%"):
        out.add_column(name, no_wrap=True)
    for c in cells[:12]:
        values = f"{c.before_us:.2f}", f"{c.after_us:.2f}", f"{c.ratio:.3f}", f"{c.slower} of {c.rounds}"
        out.add_row(f"{c.n} x {c.k}", str(c.rows), c.dtype, c.format, *values)
    return out


if __name__ == "__main__":
    main()
