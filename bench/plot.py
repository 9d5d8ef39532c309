"""The picture of a result: how many times the read floor each system takes, against the bytes it has to read."""

import json
from itertools import cycle
from pathlib import Path


def draw(path: Path) -> Path | None:
    """Reads a result (JSON) and puts a PNG beside it; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    content = json.loads(path.read_text())
    rows = [r for r in content["rows"] if _times_floor(r)]
    panels = sorted({r["rows"] for r in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4 + 5 * len(panels), 6), sharey=True, squeeze=False, layout="constrained"
    )
    kinds = dict.fromkeys((r["system"], r["format"]) for r in rows)
    colors = dict(zip(kinds, cycle([*pyplot.cm.tab10.colors, "black"])))
    for axis, m in zip(axes[0], panels):
        lines = {}
        for r in rows:
            if r["rows"] == m:
                lines.setdefault((r["system"], r["format"], r["dtype"]), []).append(r)
        for (system, format, dtype), points in lines.items():
            points.sort(key=lambda r: r["nbytes"])
            inside = "" if points[0].get("kernel_over_floor") else " (in jit)"
            axis.plot(
                [r["nbytes"] / 2**20 for r in points],
                [_times_floor(r) for r in points],
                label=f"{system} {format}, x {dtype}{inside}",
                color=colors[system, format],
                linewidth=2 if system == "jaxgemv" else 1,
                linestyle="--" if dtype == "bfloat16" else "-",
                marker="o" if system == "jaxgemv" else "x",
                markersize=4,
            )
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xscale("log", base=4)
        axis.set(yscale="log", xlabel="weights (MiB)", title=f"M = {m}")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time / time to read as many bytes")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize="small", handlelength=4)
    env = content["environment"]
    figure.suptitle(f"{env['device']}, jaxgemv {env['jaxgemv']}, jax {env['jax']}", fontsize="medium")
    figure.savefig(path.with_suffix(".png"), dpi=150)
    pyplot.close(figure)
    return path.with_suffix(".png")


def _times_floor(row: dict) -> float | None:
    """Of the kernel alone, where that was measured."""
    return row.get("kernel_over_floor") or row.get("over_floor")
