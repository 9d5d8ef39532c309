"""What the grid says: the cells where XLA's dense product is faster, worst first, and how many they are."""

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from bench.report import error_text


class Limit(NamedTuple):
    """When a product with so many rows of x counts as slower than XLA's."""

    rows: float  # at most
    ratio: float  # above
    us: float  # and by more than so many
    name: str


LIMITS = (
    Limit(64, 1.05, 0.5, "1 to 64"),
    Limit(1024, 1.2, 0, "65 to 1024"),
    Limit(math.inf, 1.1, 0, "above 1024"),
)
# Relative errors that rounding to the type does not reach; above 64 rows a GPU may multiply float32 as TF32.
_WRONG = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 2e-3}


@dataclass
class Product:
    """A cell (grid_cells.Cell) as results have it."""

    n: int
    k: int
    rows: int
    dtype: str
    format: str
    group: int | None
    shift: str
    scale: str


@dataclass
class Row(Product):
    """With its times."""

    floor_us: float | None = None
    us: float | None = None  # one call inside jit, that needs the one before it
    spread: float | None = None
    calls: int | None = None
    dense_us: float | None = None
    ratio: float | None = None  # us / dense_us
    over_floor: float | None = None
    kernel: str | None = None
    error: float | None = None
    wrong: bool = False
    loses: bool = False
    note: str | None = None  # why there is no time


def limit(rows: int) -> Limit:
    return next(each for each in LIMITS if rows <= each.rows)


def loses(r: Row) -> bool:
    if r.us is None or r.dense_us is None:
        return False
    here = limit(r.rows)
    return r.us > here.ratio * r.dense_us and r.us - r.dense_us > here.us


def complete(rows: list[Row]) -> None:
    """Fills in what follows from other columns."""
    for r in rows:
        r.loses = loses(r)
        r.ratio = r.us / r.dense_us if r.us and r.dense_us else None
        r.over_floor = r.us / r.floor_us if r.us and r.floor_us else None
        r.wrong = r.error is not None and not r.error <= _WRONG[r.dtype]  # NaN is wrong


def losing_table(rows: list[Row], device: str) -> Table:
    losing = sorted((r for r in rows if r.loses), key=lambda r: -(r.ratio or 0))
    columns = "N x K", "M", "x", "weights", "kernel", "us", "XLA dense us", "ratio", "x floor", "err"
    return _table(f"{device}: slower than XLA's dense product, worst first", losing, columns)


def problem_table(rows: list[Row]) -> Table:
    """Cells with wrong results, or without one."""
    bad = [r for r in rows if r.wrong or r.note]
    return _table("[bold red]WRONG, or without a result", bad, ("N x K", "M", "x", "weights", "err", "note"))


def _table(title: str, rows: list[Row], columns: tuple[str, ...]) -> Table:
    values = {
        "N x K": lambda r: f"{r.n} x {r.k}",
        "M": lambda r: str(r.rows),
        "x": lambda r: r.dtype,
        "weights": weights_text,
        "kernel": lambda r: r.kernel or "",
        "us": lambda r: f"{r.us:.2f}",
        "XLA dense us": lambda r: f"{r.dense_us:.2f}",
        "ratio": lambda r: f"{r.ratio:.2f}",
        "x floor": lambda r: f"{r.over_floor:.2f}" if r.over_floor else "",
        "err": lambda r: f"[bold red]{r.error:.0e} WRONG[/]" if r.wrong else error_text(r.error),
        "note": lambda r: r.note or "",
    }
    out = Table(title=title, title_justify="left")
    for name in columns:
        left = name in ("N x K", "x", "weights", "kernel", "note")
        out.add_column(name, justify="left" if left else "right", no_wrap=name != "note")
    for r in rows:
        out.add_row(*(values[name](r) for name in columns))
    return out


def weights_text(r: Product) -> str:
    group = "a row" if r.group is None else f"g{r.group}"
    return f"{r.format} {group}, scale {r.scale}" + ("" if r.shift == "none" else f", {r.shift}")


def summary(rows: list[Row]) -> list[dict]:
    """For each range of rows: how many cells, and how many of them lose."""
    out = []
    for each in LIMITS:
        here = [r for r in rows if limit(r.rows) is each]
        ratios = [r.ratio for r in here if r.ratio]
        out.append(
            {
                "rows": each.name,
                "loses_above": each.ratio,
                "cells": len(here),
                "losing": sum(r.loses for r in here),
                "wrong": sum(r.wrong for r in here),
                "without_a_result": sum(r.note is not None for r in here),
                "median_ratio": statistics.median(ratios) if ratios else None,
                "worst_ratio": max(ratios, default=None),
            }
        )
    return out


def summary_table(rows: list[Row]) -> Table:
    out = Table(title="our time over that of XLA's dense product", title_justify="left")
    for name in ("rows of x", "cells", "losing", "wrong", "no result", "median ratio", "worst"):
        out.add_column(name, justify="right")
    for s in summary(rows):
        counts = (str(s[name]) for name in ("cells", "losing", "wrong", "without_a_result"))
        ratios = ("" if s[name] is None else f"{s[name]:.2f}" for name in ("median_ratio", "worst_ratio"))
        out.add_row(s["rows"], *counts, *ratios)
    return out


def notes(method: dict) -> list[str]:
    """What the tables do not say by themselves."""
    links = ", ".join(f"{dtype} {us:.2f}" for dtype, us in method["link_us"].items())
    limits = "; ".join(
        f"{each.name} rows: more than {each.ratio:g} times as long"
        + f" and {each.us} us longer" * bool(each.us)
        for each in LIMITS
    )
    return [
        f"Losing: {limits}.",
        "us: one call in jit that needs the y of the one before it, cold weights.",
        "A cell that loses was timed again, in turns with XLA.",
        f"What feeds a y to the next call takes (us) {links}; that is subtracted from ours and XLA's.",
        f"floor: {method['floor']}.",
        f"--seed {method['seed']}: {method['cells']} cells in {method['seconds']:.0f} s.",
    ]
