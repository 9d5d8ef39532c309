"""Times jaxgemv, XLA and other libraries on the shapes of real decoders, beside the time it takes just to read as much.

- `python -m bench`: everything, on the GPU if there is one; torch, gemlite and bitsandbytes where they are installed
- `python -m bench --quick`: a first look
- `python -m bench --rows 1,16,64 --save`: more rows of x; JSON and a plot go to bench/results/
- `python -m bench --shapes 4096x4096 --formats int4 --systems jaxgemv --dtypes float16`: one kernel, for a profiler
- `python -m bench --platform cpu --rows 1,16,64 --ggml libggml.so`: on the CPU, beside torch, MLX and llama.cpp
- `python -m bench --grid --seed 1`: some 300 products of every kind, and those that are slower than XLA's dense product
- `python -m bench --plot FILE.json`: draws an earlier result again, with --shapes the shapes that you name
"""

import argparse
import os
from pathlib import Path

import jax

from bench import (
    arguments,
    environment,
    floor,
    grid,
    grid_cells,
    grid_plot,
    grid_report,
    host_systems,
    measure,
    native,
    plot,
    report,
    systems,
    timing,
    torch_systems,
)

PLANS = {
    "gpu": timing.Plan(rotate=400e6, copies_range=(4, 100), calls=100, memory=8e9, repeats=15, executions=24),
    # JAX may run several executions side by side on a CPU, so there is only ever one.
    "cpu": timing.Plan(rotate=256e6, copies_range=(4, 64), calls=1, memory=2e9, repeats=11, executions=1),
}


_MEASURE = {
    systems.System: measure.measure,
    torch_systems.TorchSystem: torch_systems.measure,
    host_systems.HostSystem: host_systems.measure,
}


def main() -> None:
    args = _arguments()
    if args.plot:
        print(_plot(args.plot, args.shapes))
        return
    # JAX takes its share of the GPU at once; torch needs the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    if args.platform:
        jax.config.update("jax_platforms", args.platform)
    device = jax.devices()[0]
    arguments.use_isa("bench", args.isa)
    if device.platform not in PLANS:
        raise SystemExit(f"bench: no plan for platform {device.platform!r}; use --platform cpu")
    if args.grid:
        _grid(device, args)
        return
    args.rows = args.rows or [1]
    plan = PLANS[device.platform]
    if args.quick:
        plan = plan._replace(repeats=5)
    cells = _cells(device.platform, args)
    if not cells:
        raise SystemExit("bench: nothing to measure; see SYSTEMS in bench/systems.py")

    console = report.console()
    env = environment.environment(device, args.commit)
    rows: list[report.Row] = []
    with report.progress() as progress:
        task = progress.add_task("compiling, reading", total=len(cells) * len(args.rows))
        read, library = _floor(device, plan, cells)
        setup = measure.Setup(device.platform, plan, library)
        for n, k, dtype, system in cells:
            what = f"{system.name} {system.format}, {n} x {k}, x {dtype}"
            progress.update(task, description=what)
            try:
                for each in _MEASURE[type(system)](system, n, k, dtype, args.rows, setup):
                    rows.append(_row(system, n, k, dtype, each, read.us(each.nbytes)))
                    progress.advance(task)
            except (RuntimeError, TypeError, ValueError) as error:
                # Out of memory, or a shape that a system cannot do: the other rows are still worth having.
                console.print(f"{what}: {str(error).splitlines()[0]}", markup=False)
        progress.update(task, description="done")
    shapes = list(dict.fromkeys(cell[:2] for cell in cells))
    rows.sort(key=lambda r: (shapes.index((r.n, r.k)), r.rows))

    baseline = systems.BASELINE[device.platform]
    report.compare(rows, baseline)
    console.print(report.table(rows, env["device"], baseline))
    lines = report.notes(rows, read.how, read.empty_us)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if args.save or args.out:
        method = {**plan._asdict(), "empty_call_us": read.empty_us, "baseline": baseline, "notes": lines}
        path = report.save(args.out, env, method, rows)
        console.print(f"saved to {path}; {_plot(path)}", markup=False)


def _grid(device, args) -> None:
    chosen = {
        name: [value for value in grid_cells.DIMENSIONS[name] if _chosen(wanted, value)]
        for name, wanted in (("dtype", args.dtypes), ("format", args.formats))
    }
    chosen |= {"shape": args.shapes, "rows": args.rows}
    cells = grid_cells.cells(device.platform, args.seed, args.cells, chosen)
    env = environment.environment(device, args.commit)
    with report.progress() as progress:
        task = progress.add_task("compiling, reading", total=len(cells))
        rows, method = grid.run(device, cells, progress, task)
        progress.update(task, description="done")
    method |= {"seed": args.seed, "cells": len(cells), "summary": grid_report.summary(rows)}
    console = report.console()
    for table in (grid_report.losing_table(rows, env["device"]), grid_report.problem_table(rows)):
        if table.row_count:
            console.print(table)
    console.print(grid_report.summary_table(rows))
    for line in grid_report.notes(method):
        console.print(line, markup=False, highlight=False)
    if args.save or args.out:
        path = report.save(args.out, env, {"grid": True, **method}, rows, "-grid")
        console.print(f"saved to {path}; {_plot(path)}", markup=False)


def _plot(path: Path, shapes: list[tuple[int, int]] | None = None) -> str:
    method = arguments.saved("bench", path)["method"]
    picture = grid_plot.draw(path) if "grid" in method else plot.draw(path, shapes)
    return f"plot: {picture}" if picture else "no plot: no matplotlib, or nothing to draw"


def _floor(device, plan, cells):
    """(the read floor, the native part or None)"""
    if device.platform == "cpu":
        reader, missing = native.load_reader()
        if reader is None:
            return floor.NoFloor(missing), None
        return floor.CpuFloor(reader, host_systems.THREADS, int(plan.rotate)), None
    library, missing = native.load(device)
    if library is None:
        return floor.NoFloor(missing), None
    largest = max(2.1 * n * k for n, k, *_ in cells)
    library = native.Native(library, int(plan.rotate + largest))
    return floor.GpuFloor(library, plan.calls), library


def _row(system, n, k, dtype, measured: measure.Measured, floor_us) -> report.Row:
    sample = measured.sample
    return report.Row(
        n=n,
        k=k,
        rows=measured.rows,
        dtype=dtype,
        format=system.format,
        system=system.name,
        us=sample and sample.us,
        spread=sample and sample.spread,
        enqueue_us=sample and sample.enqueue_us,
        calls=sample and sample.calls,
        nbytes=measured.nbytes,
        floor_us=floor_us,
        kernel_us=measured.kernel_us,
        error=measured.error,
        note=measured.note,
    )


def _cells(platform: str, args) -> list:
    """(N, K, dtype of x, system) for each set of weights."""
    shapes = args.shapes or (systems.QUICK_SHAPES if args.quick else systems.SHAPES)[platform]
    chosen = [
        s
        for s in (*systems.SYSTEMS, *torch_systems.SYSTEMS, *host_systems.systems(args.ggml))
        if _chosen(args.systems, s.name) and _chosen(args.formats, s.format)
    ]
    chosen = [
        s
        for s in chosen
        if not isinstance(s, torch_systems.TorchSystem) or torch_systems.installed(s, platform)
    ]
    return [
        (n, k, dtype, system)
        for n, k in shapes
        for system in chosen
        for dtype in system.dtypes.get(platform, ())
        if _chosen(args.dtypes, dtype)
    ]


def _chosen(wanted: list[str] | None, name: str) -> bool:
    """Whether a filter matches, by whole words: `int4` is in `int4 g128`, `float16` is not in `bfloat16`."""
    words = name.lower().split()
    return wanted is None or any(all(w in words for w in each.lower().split()) for each in wanted)


def _arguments():
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = arguments.words
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer repeats")
    parser.add_argument(
        "--shapes", type=arguments.shapes, metavar="NxK,...", help="instead of the usual ones"
    )
    parser.add_argument("--rows", type=arguments.numbers, metavar="M,...", help="rows of x (default: 1)")
    parser.add_argument("--formats", type=words, metavar="NAME,...", help="int4, nf4, mxfp4, fp8, bf16 ...")
    parser.add_argument(
        "--systems", type=words, metavar="NAME,...", help="jaxgemv, XLA, torch, gemlite, bitsandbytes, mlx"
    )
    parser.add_argument("--dtypes", type=words, metavar="NAME,...", help="of x: float16, bfloat16, float32")
    parser.add_argument("--grid", action="store_true", help="many kinds of products, beside XLA's dense one")
    parser.add_argument("--seed", type=int, default=0, help="which cells the grid has (default: 0)")
    parser.add_argument("--cells", type=int, default=300, help="how many, at least (default: 300)")
    parser.add_argument(
        "--save", action="store_true", help="write JSON and PNG to bench/results/<device>-<date>"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON to FILE, and a PNG beside it")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the PNG of such a FILE, and do no more"
    )
    parser.add_argument("--ggml", metavar="PATH", help="on the CPU, libggml of llama.cpp, to compare with")
    parser.add_argument("--isa", help="on the CPU, avx2, say, instead of the best of the processor")
    parser.add_argument("--commit", help="recorded in the JSON (default: $JAXGEMV_COMMIT, or git's HEAD)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
