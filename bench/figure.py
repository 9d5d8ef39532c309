"""What the pictures of results have in common: how they begin and end, and what they call a device."""

from collections.abc import Callable
from pathlib import Path

from bench import arguments


def opened(path: Path, drawn: Callable[[dict], object]) -> tuple | None:
    """(pyplot, the environment, rows) of a result (JSON); None without matplotlib or a row that is drawn."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = arguments.saved("bench", path)
    rows = [r for r in content["rows"] if drawn(r)]
    return (pyplot, content["environment"], rows) if rows else None


def device(env: dict) -> str:
    return env["device"] + (f", {env['threads']} threads" if "threads" in env else "")


def unit(env: dict) -> tuple[str, float]:
    """(its name, microseconds)"""
    return ("milliseconds", 1e3) if env["platform"] == "cpu" else ("microseconds", 1)


def saved(pyplot, figure, path: Path) -> Path:
    """The PNG beside the result."""
    figure.savefig(path.with_suffix(".png"), dpi=150)
    pyplot.close(figure)
    return path.with_suffix(".png")
