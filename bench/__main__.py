"""Times jaxgemv and XLA on the shapes of real decoders, next to the time it takes just to read as many bytes.

- `python -m bench`: everything, on the GPU if there is one
- `python -m bench --quick`: a first look
- `python -m bench --rows 1,16,64 --save`: more rows of x; the result goes to bench/results/
- `python -m bench --shapes 4096x4096 --formats int4 --systems jaxgemv --dtypes float16`: one kernel, for a profiler
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxgemv
from bench import floor, native, report, systems, timing

PLANS = {
    "gpu": timing.Plan(
        rotate=400e6, copies_range=(20, 128), calls=200, memory=8e9, repeats=11, executions=24
    ),
    # JAX may run several executions side by side on a CPU, so there is only ever one.
    "cpu": timing.Plan(rotate=256e6, copies_range=(4, 64), calls=1, memory=2e9, repeats=11, executions=1),
}


def main() -> None:
    args = _arguments()
    if args.platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.platform, args.platform))
    device = jax.devices()[0]
    if device.platform not in PLANS:
        raise SystemExit(f"bench: no plan for platform {device.platform!r}; use --platform cpu")
    plan = PLANS[device.platform]
    if args.quick:
        plan = plan._replace(repeats=5)
    cells = _cells(device.platform, args)
    if not cells:
        raise SystemExit("bench: nothing to measure; see SYSTEMS in bench/systems.py")

    # Progress goes to stderr, so that the table alone can be piped.
    console = Console(width=None if Console().is_terminal else 180)
    env = report.environment(device, args.commit)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    progress = Progress(*columns, console=Console(stderr=True))
    rows: list[report.Row] = []
    library, missing = native.load(device) if device.platform == "gpu" else (None, None)
    with progress:
        task = progress.add_task("read floor", total=len(cells))
        read = _floor(device, plan, args.quick, library, missing)
        for n, k, m, dtype, system in cells:
            what = f"{system.name} {system.format}, {n} x {k}, M = {m}, x {dtype}"
            progress.update(task, description=what)
            try:
                rows.append(_measure(system, n, k, m, dtype, device.platform, plan, read, library))
            except jax.errors.JaxRuntimeError as error:
                # Out of memory, or refused by a kernel: the other rows are still worth having.
                console.print(f"{what}: {str(error).splitlines()[0]}", markup=False)
            progress.advance(task)
        progress.update(task, description="done")

    baseline = systems.BASELINE[device.platform]
    report.compare(rows, baseline)
    console.print(report.table(rows, env["device"], baseline))
    lines = report.notes(rows, read.how, read.empty_us)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if args.save or args.out:
        method = {**plan._asdict(), "empty_call_us": read.empty_us, "baseline": baseline, "notes": lines}
        console.print(f"saved to {report.save(args.out, env, method, rows)}", markup=False)


def _floor(device, plan, quick, library, missing):
    if device.platform == "cpu":
        return floor.CpuFloor()
    if library is None:
        return floor.NoFloor(missing)
    return floor.GpuFloor(plan, library, floor.GRIDS[:3] if quick else floor.GRIDS)


def _measure(system, n, k, m, dtype, platform, plan, read, library) -> report.Row:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    x = jax.random.normal(keys[0], (m, k), dtype)
    make = partial(system.weights, n=n, k=k, dtype=dtype)
    shapes = jax.tree.leaves(jax.eval_shape(make, keys[1]))
    weight_bytes = sum(a.size * a.dtype.itemsize for a in shapes)
    copies = [make(key) for key in jax.random.split(keys[1], plan.copies(weight_bytes))]

    program = timing.compile_chain(system.product, platform, plan)
    y = program(x, copies)[-1]
    error = float(systems.relative_error(y, x, copies[-1], system.dense))
    sample = timing.measure(program, x, copies, plan)
    alone = None
    if library is not None and isinstance(copies[0], jaxgemv.QuantizedTensor):
        alone = native.graph_products(library, x, copies, y)
    del copies  # makes room for the floor's
    nbytes = weight_bytes + x.nbytes + y.nbytes
    floor_us, kernel_floor_us = read.us(nbytes)
    implementation = {"gpu": "cuda"}.get(platform, platform)
    return report.Row(
        n=n,
        k=k,
        rows=m,
        dtype=jnp.dtype(dtype).name,
        format=system.format,
        system=system.name,
        nbytes=nbytes,
        gb_per_s=nbytes / sample.us / 1e3,
        floor_us=floor_us,
        kernel_us=alone,
        kernel_floor_us=kernel_floor_us,
        error=error,
        note=systems.without_kernel(system, n, k, m, dtype, implementation),
        **sample._asdict(),
    )


def _cells(platform: str, args) -> list:
    """(N, K, M, dtype of x, system) for each row of the table."""
    shapes = args.shapes or (systems.QUICK_SHAPES if args.quick else systems.SHAPES)[platform]
    return [
        (n, k, m, dtype, system)
        for n, k in shapes
        for m in args.rows
        for system in systems.SYSTEMS
        for dtype in system.dtypes.get(platform, ())
        if _chosen(args.systems, system.name)
        and _chosen(args.formats, system.format)
        and _chosen(args.dtypes, dtype)
    ]


def _chosen(wanted: list[str] | None, name: str) -> bool:
    """Whether a filter matches, by whole words: `int4` is in `int4 g128`, `float16` is not in `bfloat16`."""
    words = name.lower().split()
    return wanted is None or any(all(w in words for w in each.lower().split()) for each in wanted)


def _arguments():
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = partial(str.split, sep=",")
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: JAX's")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer repeats")
    parser.add_argument(
        "--shapes", "--only", type=_shapes, metavar="NxK,...", help="instead of the usual ones"
    )
    parser.add_argument("--rows", type=_numbers, default=[1], metavar="M,...", help="rows of x (default: 1)")
    parser.add_argument("--formats", type=words, metavar="NAME,...", help="int4, int8, bf16, f32")
    parser.add_argument("--systems", type=words, metavar="NAME,...", help="jaxgemv, XLA")
    parser.add_argument("--dtypes", type=words, metavar="NAME,...", help="of x: float16, bfloat16, float32")
    parser.add_argument(
        "--save", action="store_true", help="write JSON to bench/results/<device>-<date>.json"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON to FILE")
    parser.add_argument("--commit", help="recorded in the JSON (default: $JAXGEMV_COMMIT, or git's HEAD)")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        n, k = part.lower().split("x")
        shapes.append((int(n), int(k)))
    return shapes


if __name__ == "__main__":
    main()
