"""The picture of a run of bench.decode: of each step how much our kernels, XLA's and nothing took, beside peers."""

from pathlib import Path

from bench import figure as figures
from bench.decode_report import OURS, text

_PARTS = {
    "ours_us": ("our kernels", "#0b6e99"),
    "xla_us": ("XLA's", "#7fb8d4"),
    "idle_us": ("idle", "#e6e6e6"),
}
_WHOLE, _LIMIT = "#e0a458", "#c0392b"  # of peers, and of ours without a profile; of the read limit


def draw(path: Path) -> Path | None:
    """Reads a result (JSON) and puts a PNG beside it; None without matplotlib or a time."""
    found = figures.opened(path, lambda r: r["us"])
    if found is None:
        return None
    from matplotlib.patches import Patch

    pyplot, env, rows = found
    models = list(dict.fromkeys(r["model"] for r in rows))
    problems = sorted({(r["batch"], r["context"]) for r in rows})
    lines = {model: _lines([r for r in rows if r["model"] == model]) for model in models}
    heights = [0.8 + 0.27 * len(lines[model]) for model in models]
    figure, axes = pyplot.subplots(
        len(models),
        len(problems),
        figsize=(2 + 2.7 * max(len(problems), 2), 1.3 + sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    unit, us_a_unit = figures.unit(env)
    for line, model in zip(axes, models):
        for axis, (batch, context) in zip(line, problems):
            here = [r for r in rows if (r["model"], r["batch"], r["context"]) == (model, batch, context)]
            _panel(axis, here, lines[model], us_a_unit, names=axis is line[0])
            first = model if axis is line[0] else ""
            axis.set_title(f"{first}\nbatch {batch}, context {context}", fontsize=9, loc="left")
    count = max(r["devices"] for r in rows)
    device = (f"{count} x " if count > 1 else "") + figures.device(env)
    figure.suptitle(f"One token of each sequence on {device}: {unit}, less is better", fontsize=11, wrap=True)
    parts = [Patch(color=color, label=label) for label, color in _PARTS.values()]
    parts += [
        Patch(color=_WHOLE, label="others, all together"),
        Patch(color=_LIMIT, label="just to read as much"),
    ]
    figure.legend(handles=parts, loc="outside lower center", ncols=len(parts), fontsize=8, frameon=False)
    return figures.saved(pyplot, figure, path)


def _lines(rows: list[dict]) -> list[tuple[str, ...]]:
    """A bar for each: ours first."""
    return sorted({_line(r) for r in rows}, key=lambda s: (s[0] != OURS, s))


def _line(r: dict) -> tuple[str, ...]:
    """Its system, weights, and activations where these are not the model's own."""
    x = r.get("activations", "")
    return r["system"], r["weights"], *([f"x {x}"] if x not in ("", "exact") else [])


def _panel(axis, rows: list[dict], lines: list, us_a_unit: float, names: bool) -> None:
    longest = max((r["us"] for r in rows), default=1) / us_a_unit
    for r in rows:
        y, begin = lines.index(_line(r)), 0.0
        parts = {name: color for name, (_, color) in _PARTS.items() if r[name]} or {"us": _WHOLE}
        # What was profiled may have taken longer than what was timed: the bar is as long as the time.
        scale = r["us"] / sum(r[name] for name in parts) / us_a_unit
        for name, color in parts.items():
            axis.barh(y, scale * r[name], left=begin, color=color, height=0.72)
            begin += scale * r[name]
        if r["limit_us"]:
            limit = r["limit_us"] / us_a_unit
            axis.plot([limit, limit], [y - 0.42, y + 0.42], color=_LIMIT, linewidth=1.4)
        time = r["us"] / us_a_unit
        place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(text(time), (time, y), **place)
    axis.set_xlim(0, 1.2 * longest)
    axis.set_xticks([])
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_yticks(range(len(lines)), [" ".join(line) for line in lines] if names else [], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
