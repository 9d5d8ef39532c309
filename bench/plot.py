"""The picture of a result: the time of a product, for each system that multiplies 4-bit or float weights."""

from pathlib import Path

from bench import figure as figures

FORMATS = "int4", "bf16", "f32"  # drawn; of each system the fastest, whatever its groups and its type of x
_LONGEST = 6  # bars are cut at so many times jaxgemv's
_OURS, _FLOAT, _OTHER = "#0b6e99", "#b9b9b9", "#e0a458"


def draw(path: Path, shapes: list[tuple[int, int]] | None = None) -> Path | None:
    """Reads a result (JSON) and puts a PNG beside it; None without matplotlib or a time.

    shapes: N x K, instead of the first four that were measured.
    """
    found = figures.opened(path, lambda r: _us(r) and not r["note"])
    if found is None:
        return None
    pyplot, env, timed = found
    rows = [r for r in timed if _system(r)[1] in FORMATS] or timed
    shapes = shapes or list(dict.fromkeys((r["n"], r["k"]) for r in rows))[:4]
    counts = sorted({r["rows"] for r in rows})
    systems = sorted({_system(r) for r in rows}, key=lambda s: (s[0] != "jaxgemv", s[1] != "int4", s))

    figure, axes = pyplot.subplots(
        len(counts),
        len(shapes),
        figsize=(1.1 + 2.6 * max(len(shapes), 2), 1.3 + (0.35 + 0.3 * len(systems)) * len(counts)),
        squeeze=False,
        layout="constrained",
    )
    unit, us_a_unit = figures.unit(env)
    for line, m in zip(axes, counts):
        for axis, (n, k) in zip(line, shapes):
            here = [r for r in rows if (r["n"], r["k"], r["rows"]) == (n, k, m)]
            _panel(axis, here, systems, us_a_unit, names=axis is line[0])
            each = f", {_rows(m)}" if len(counts) > 1 else ""
            axis.set_title(f"{n} x {k}{each}", fontsize=10, loc="left")
    what = "a product" + (f" with {_rows(*counts)}" if len(counts) == 1 else "")
    break_ = " " if len(shapes) > 2 else "\n"
    figure.suptitle(f"Time of {what} on {figures.device(env)}:{break_}{unit}, less is better", fontsize=12)
    figure.supxlabel(
        f"Weights are N x K, read from memory and not from a cache.{break_}"
        "Red line: the time it takes just to read the int4 weights.",
        fontsize=9,
    )
    return figures.saved(pyplot, figure, path)


def _panel(axis, rows: list[dict], systems: list, us_a_unit: float, names: bool) -> None:
    times = {s: min((_us(r) / us_a_unit for r in rows if _system(r) == s), default=None) for s in systems}
    ours = [r for r in rows if _system(r) == systems[0]]
    longest = max((t for t in times.values() if t), default=1)
    end = min(longest, _LONGEST * times[systems[0]]) if ours else longest
    for y, (system, time) in enumerate(times.items()):
        if time is None:
            continue
        color = _OURS if system[0] == "jaxgemv" else _OTHER if system[1] == "int4" else _FLOAT
        axis.barh(y, min(time, end), color=color, height=0.72)
        fits = time <= end
        axis.annotate(
            f"{time:.{2 if time < 1 else 1}f}" + " \N{RIGHTWARDS ARROW}" * (not fits),
            (min(time, end), y),
            xytext=(3 if fits else -3, 0),
            textcoords="offset points",
            ha="left" if fits else "right",
            va="center",
            fontsize=9,
        )
    floors = [r["floor_us"] / us_a_unit for r in ours if r["floor_us"]]
    if floors:
        axis.axvline(min(floors), color="#c0392b", linewidth=1.2)
    axis.set_xlim(0, 1.22 * end)
    axis.set_xticks([])
    axis.set_yticks(range(len(systems)), [" ".join(s) for s in systems] if names else [])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _rows(m: int) -> str:
    return "one row of x" if m == 1 else f"{m} rows of x"


def _system(row: dict) -> tuple[str, str]:
    return row["system"], row["format"].split()[0]


def _us(row: dict) -> float:
    """Inside jit; torch and gemlite in a CUDA graph."""
    return row["us"] or row["kernel_us"]
