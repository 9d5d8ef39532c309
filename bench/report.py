"""What a run leaves behind: the table, and a JSON file that says where the numbers come from."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxgemv

RESULTS = Path(__file__).parent / "results"
_WRONG = 1e-2  # a relative error that rounding to bfloat16 does not reach
_HOST_BOUND = 0.9


@dataclass
class Row:
    n: int
    k: int
    rows: int  # of x: M
    dtype: str  # of x
    format: str
    system: str
    us: float | None  # one call inside jit
    spread: float | None
    enqueue_us: float | None
    calls: int | None
    nbytes: int  # weight, x and y
    floor_us: float | None
    kernel_us: float | None  # of a library that is not JAX's: one call in a captured graph
    error: float | None  # ||y - ref|| / ||ref||
    note: str | None  # why this is not a kernel's time
    gb_per_s: float | None = None
    over_floor: float | None = None
    kernel_over_floor: float | None = None
    speedup: float | None = None  # inside jit, over the baseline


def compare(rows: list[Row], baseline: tuple[str, str]) -> None:
    """Fills in what follows from other columns and other rows."""
    times = {(r.n, r.k, r.rows): r.us for r in rows if (r.system, r.format) == baseline}
    for r in rows:
        base = times.get((r.n, r.k, r.rows))
        r.gb_per_s = _ratio(r.nbytes / 1e3, r.us or r.kernel_us)
        r.over_floor = _ratio(r.us, r.floor_us)
        r.kernel_over_floor = _ratio(r.kernel_us, r.floor_us)
        r.speedup = _ratio(base, r.us)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def table(rows: list[Row], device: str, baseline: tuple[str, str]) -> Table:
    jit, alone = any(r.us for r in rows), any(r.kernel_us for r in rows)
    columns = [  # title, whether this run has it, cell
        ("us", jit, lambda r: _number(r.us) + ("*" if _host_bound(r) else "")),
        ("±%", jit, lambda r: _number(r.spread, 1, 100)),
        ("GB/s", True, lambda r: _number(r.gb_per_s, 0 if r.gb_per_s and r.gb_per_s > 100 else 1)),
        ("floor us", True, lambda r: _number(r.floor_us)),
        ("x floor", jit, lambda r: _number(r.over_floor)),
        ("kernel us", alone, lambda r: _number(r.kernel_us)),
        ("x floor", alone, lambda r: _number(r.kernel_over_floor)),
        (f"x {' '.join(baseline)}", jit, lambda r: _number(r.speedup)),
        ("err", True, lambda r: error_text(r.error)),
    ]
    columns = [(title, cell) for title, here, cell in columns if here]
    out = Table(title=f"{device}, jaxgemv {jaxgemv.__version__}, jax {jax.__version__}", title_justify="left")
    for name in ("N x K", "M", "x", "weights", "system"):
        out.add_column(name, no_wrap=True)
    for title, _ in columns:
        out.add_column(title, justify="right", no_wrap=True)
    problem = None
    for r in rows:
        if problem != (problem := (r.n, r.k, r.rows)):
            out.add_section()
        name = r.system + (" (no kernel)" if r.note else "")
        out.add_row(f"{r.n} x {r.k}", str(r.rows), r.dtype, r.format, name, *(cell(r) for _, cell in columns))
    return out


def notes(rows: list[Row], how: str, empty_us: float | None) -> list[str]:
    """What the table does not say by itself."""
    lines = [
        "us: one call inside jit, gaps between calls included, cold weights; ±%: interquartile range of the repeats.",
        "GB/s and floor: the bytes of the weight with its scales and zeros, x and y, each counted once.",
        f"floor: {how}.",
    ]
    if any(r.kernel_us for r in rows):
        lines.append(
            "kernel us, and the column after it: calls of a library that is not JAX's, in one captured CUDA graph."
        )
    if empty_us is not None:
        lines += [
            "Weights: copies that take 400 MB together, or 100 small ones; the L2 is emptied before each round.",
            f"Reading 16 bytes takes {empty_us:.2f} us.",
        ]
    if any(_host_bound(r) for r in rows):
        lines.append("*: the host enqueued no faster than this; the device may be faster.")
    lines += sorted({f"no kernel: {r.note}; this is the reference." for r in rows if r.note})
    return lines


def console() -> Console:
    """As wide as the tables are where nobody looks on."""
    return Console(width=None if Console().is_terminal else 180)


def progress() -> Progress:
    """On stderr, so that the table alone can be piped."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True))


def save(path: Path | None, env: dict, method: dict, rows: list, kind: str = "") -> Path:
    """Writes the JSON, by default to bench/results/<device>-<date><kind>.json."""
    if path is None:
        slug = re.sub(r"[^a-z0-9]+", "-", env["device"].lower()).strip("-")
        path = RESULTS / f"{slug}-{env['date'][:10]}{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": env, "method": method, "rows": [asdict(r) for r in rows]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _host_bound(row: Row) -> bool:
    return row.us is not None and row.enqueue_us is not None and row.enqueue_us > _HOST_BOUND * row.us


def _number(value: float | None, digits: int = 2, times: float = 1) -> str:
    return "" if value is None else f"{times * value:.{digits}f}"


def error_text(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.0e}" if error < _WRONG else f"[bold red]{error:.0e} WRONG[/]"  # NaN is wrong
