"""The picture of a grid: our time over that of XLA's dense product, the worst cell of each bin."""

from pathlib import Path

from bench import figure as figures

_FACTOR = 4  # where colours end: so many times faster or slower


def draw(path: Path) -> Path | None:
    """Reads a result (JSON) and puts a PNG beside it; None without matplotlib or a time."""
    found = figures.opened(path, lambda r: r["ratio"])
    if found is None:
        return None
    from matplotlib.colors import LogNorm

    pyplot, env, rows = found
    lines = sorted({(r["dtype"], r["format"]) for r in rows})
    panels = {
        "rows of x": (lambda r: r["rows"], str),
        "N x K": (lambda r: (r["n"] * r["k"], r["n"], r["k"]), lambda key: f"{key[1]} x {key[2]}"),
    }
    counts = [len({key(r) for r in rows}) for key, _ in panels.values()]
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(3 + 0.42 * sum(counts), 2.2 + 0.26 * len(lines)),
        width_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    picture = None
    for axis, (name, (key, text)) in zip(axes[0], panels.items()):
        columns = sorted({key(r) for r in rows})
        bins: dict[tuple[int, int], list[dict]] = {}
        for r in rows:
            at = lines.index((r["dtype"], r["format"])), columns.index(key(r))
            bins.setdefault(at, []).append(r)
        worst = [
            [
                max((r["ratio"] for r in bins.get((y, x), ())), default=float("nan"))
                for x in range(len(columns))
            ]
            for y in range(len(lines))
        ]
        axis.set_facecolor("#e6e6e6")  # no cell
        norm = LogNorm(1 / _FACTOR, _FACTOR)
        picture = axis.imshow(worst, cmap="RdYlBu_r", norm=norm, aspect="auto")
        for (y, x), here in bins.items():
            slow = any(r["loses"] for r in here)
            weight = "bold" if slow else "normal"
            axis.text(x, y, f"{worst[y][x]:.2g}", ha="center", va="center", fontsize=6, weight=weight)
            if slow:
                box = pyplot.Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, linewidth=1.4)
                axis.add_patch(box)
        axis.set_xticks(range(len(columns)), [text(each) for each in columns], rotation=90, fontsize=8)
        labels = [" ".join(line) for line in lines] if axis is axes[0][0] else []
        axis.set_yticks(range(len(lines)) if labels else [], labels, fontsize=8)
        axis.set_xlabel(name)
    figure.suptitle(f"Our time over that of XLA's dense product on {figures.device(env)}", fontsize=11)
    bar = figure.colorbar(picture, ax=list(axes[0]), ticks=(0.25, 0.5, 1, 2, 4), extend="both", pad=0.01)
    bar.ax.set_yticklabels(("1/4", "1/2", "1", "2", "4"))
    bar.minorticks_off()
    bar.set_label("worst cell; framed: one that loses", fontsize=8)
    return figures.saved(pyplot, figure, path)
