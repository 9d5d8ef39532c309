"""What a step of decoding took: rows, their table, and what it does not say by itself."""

from dataclasses import dataclass, field

from rich.table import Table

import jaxgemv
from bench import timing

OURS = "jaxgemv"


@dataclass
class Row:
    """A step is one token of each of `batch` sequences."""

    model: str
    weights: str
    activations: str
    system: str
    batch: int
    context: int  # tokens in the cache before the first that is timed
    size: int  # tokens that it has room for
    devices: int = 1
    steps_per_call: int = 1
    us: float | None = None
    spread: float | None = None
    tokens_per_s: float | None = None
    nbytes: int | None = None  # weights, keys and values that a step must read, on one device
    limit_us: float | None = None  # as long as it takes to read them
    over_limit: float | None = None
    ours_us: float | None = None  # in kernels of jaxgemv
    xla_us: float | None = None  # in others
    idle_us: float | None = None
    enqueue_us: float | None = None  # until the host has asked for it
    compile_s: float | None = None
    rounds_us: list[float] = field(default_factory=list)
    kernels: dict[str, list[float]] = field(default_factory=dict)  # how many a step, and their us together
    note: str | None = None  # what is missing, and why


def complete(r: Row, bytes_per_us: float | None) -> None:
    """Fills in what follows from other columns."""
    r.spread = timing.spread(r.rounds_us) if len(r.rounds_us) > 1 else None
    r.rounds_us = [round(us, 2) for us in r.rounds_us]
    r.tokens_per_s = 1e6 * r.batch / r.us if r.us else None
    r.limit_us = r.nbytes / bytes_per_us if r.nbytes and bytes_per_us else None
    r.over_limit = r.us / r.limit_us if r.us and r.limit_us else None


def table(rows: list[Row], device: str) -> Table:
    columns = {
        "tokens/s": lambda r: text(r.tokens_per_s),
        "us": lambda r: text(r.us),
        "±%": lambda r: text(r.spread and 100 * r.spread, 1),
        "limit": lambda r: text(r.limit_us),
        "x limit": lambda r: text(r.over_limit, 2),
        "ours": lambda r: text(r.ours_us),
        "XLA": lambda r: text(r.xla_us),
        "idle": lambda r: text(r.idle_us),
        "enqueue": lambda r: text(r.enqueue_us),
        "compile s": lambda r: text(r.compile_s, 1),
    }
    columns = {name: cell for name, cell in columns.items() if any(cell(r) for r in rows)}
    title = f"decoding on {device}, jaxgemv {jaxgemv.__version__}"
    if rows and rows[0].devices > 1:
        title += f", {rows[0].devices} devices"
    out = Table(title=title, title_justify="left")
    for name in ("model", "weights", "x", "system"):
        out.add_column(name, no_wrap=True)
    for name in ("batch", "context", *columns):
        out.add_column(name, justify="right", no_wrap=True)
    group = None
    for r in rows:
        if group != (group := (r.model, r.batch, r.context)):
            out.add_section()
        cells = (cell(r) for cell in columns.values())
        out.add_row(r.model, r.weights, r.activations, r.system, str(r.batch), str(r.context), *cells)
    return out


def notes(rows: list[Row], how: str) -> list[str]:
    lines = [
        "us: a step, which is one token of each sequence; its kernels, and what is read for it, likewise.",
        f"limit: {how}.",
    ]
    if any(r.ours_us is not None for r in rows):
        lines.append(
            "ours, XLA: in whose kernels, by a profile, which may slow them down; idle: what that leaves of us."
        )
    missing = {
        f"{r.model} {r.weights}, {r.activations} x, {r.system}: {r.note}": None for r in rows if r.note
    }
    return lines + list(missing)


def row(**values) -> Row:
    """Of what a peer answered, too, which may be more than a row has."""
    return Row(**{name: value for name, value in values.items() if name in Row.__dataclass_fields__})


def order(rows: list[Row]) -> list[Row]:
    """Those that do the same beside each other, ours first; models as they came."""
    models = list(dict.fromkeys(r.model for r in rows))
    return sorted(rows, key=lambda r: (models.index(r.model), r.batch, r.context, r.system != OURS))


def text(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if digits is not None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
