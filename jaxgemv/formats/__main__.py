"""What is in a checkpoint: python -m jaxgemv.formats PATH"""

import os
import sys
from collections.abc import Sequence
from math import prod

from jaxgemv.formats import open as open_checkpoint

_HEAD = ("name", "shape", "format", "bits a weight", "bytes")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print("usage: python -m jaxgemv.formats PATH", file=sys.stderr)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        entries = open_checkpoint(arguments[0]).entries
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    rows = [_row(name, e.shape, e.format, e.nbytes, prod(e.shape)) for name, e in entries.items()]
    weights, nbytes = (
        sum(each) for each in zip((0, 0), *((prod(e.shape), e.nbytes) for e in entries.values()))
    )
    total = _row(f"{len(entries)} tensors", None, "", nbytes, weights)
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        Console = Table = None
    if Console is None or Table is None or not sys.stdout.isatty():  # what reads a pipe wants whole lines
        _print(rows, total)
        return 0
    table = Table(box=None, show_footer=True, pad_edge=False)
    for column, (head, foot) in enumerate(zip(_HEAD, total)):
        table.add_column(head, foot, justify="right" if column > 2 else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
    return 0


def _row(name: str, shape: tuple[int, ...] | None, format: str, nbytes: int, weights: int) -> tuple[str, ...]:
    sizes = "" if shape is None else " x ".join(map(str, shape)) or "()"
    return name, sizes, format, f"{nbytes * 8 / weights:.2f}" if weights else "", f"{nbytes:,}"


def _print(rows: list[tuple[str, ...]], total: tuple[str, ...]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, total)]
    for row in (_HEAD, *rows, total):
        cells = [f"{cell:>{w}}" if i > 2 else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # what reads has seen enough, `head` say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
