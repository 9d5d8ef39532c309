"""Decodes with whole models: tokens a second, how long a token takes, and in whose kernels that goes.

- `python -m bench.decode --save`: models of random weights; JSON and a plot go to bench/results/
- `python -m bench.decode --sizes 0.5b,1b --weights bf16,int4 --batches 1 --contexts 128`: a first look
- `python -m bench.decode --devices 2 --sizes 8b`: each matrix cut over two GPUs
- `python -m bench.decode --steps-per-call 8`: eight tokens from one jitted program, as a loop in it
- `python -m bench.decode --platform cpu --gguf FILE.gguf --llama-cpp`: a file as it is, beside llama.cpp
- `python -m bench.decode --activations exact,int8`: x of each product as it is, and in 8 bits as llama.cpp has it
- `python -m bench.decode --plot FILE.json`: draws an earlier result again

A step is that of examples/decode.py: one jitted dispatch, the cache donated, the most likely token taken. The token
stays where it is, so that the host may run ahead. Several sequences are a `vmap` of it.
On a GPU torch, where it is installed, decodes with a model of the same shape, compiled and as a CUDA graph; on a CPU
llama.cpp with the same file, by xllamacpp, ik_llama_cpp or llama_cpp. `--without torch` leaves one out.
"""

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax

from bench import arguments, decode_peers, decode_plot, environment, floor, host_systems, native, report
from bench import decode_report as reports
from bench import decode_step as step

SIZES = {"gpu": ["0.5b", "1b", "8b"], "cpu": ["0.5b"]}
_READ = {"gpu": 1 << 30, "cpu": 1 << 28}  # bytes: much more than any cache
_TORCH_WEIGHTS = "bf16", "int4"
# Out of memory, say: the other rows are still worth having.
_FAILURES = RuntimeError, TypeError, ValueError, MemoryError, OSError


def main() -> None:
    args = _arguments()
    if args.plot:
        print(decode_plot.draw(args.plot))
        return
    # JAX takes its share of the GPU at once; torch needs the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    if args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", args.devices)
    devices = jax.devices()[: args.devices]
    if len(devices) < args.devices:
        raise SystemExit(f"bench.decode: --devices must be at most {len(devices)}; got {args.devices}")
    if args.devices > 1 and args.gguf:
        raise SystemExit("bench.decode: --devices is for random weights, not for --gguf")
    args.sizes = args.sizes or ([] if args.gguf else SIZES[devices[0].platform])
    plan = step.Plan(args.tokens, args.rounds, args.steps_per_call, traced=8)
    env = environment.environment(devices[0], args.commit, "bench.decode")

    console = report.console()
    rows: list[reports.Row] = []
    path = None
    with report.progress() as progress:
        models = len(args.activations) * (len(args.sizes) * len(args.weights) + bool(args.gguf))
        total = models * len(args.batches) * len(args.contexts)
        task = progress.add_task("reading", total=total + len(_peer_cells(args, devices[0], plan)))
        bytes_per_us, how = _read_limit(devices[0])
        method = {"decode": True, **plan._asdict(), "limit": how, "bytes_per_us": bytes_per_us}
        with suppress(KeyboardInterrupt):  # what was measured is worth having
            for row in _rows(args, devices, plan, partial(progress.update, task)):
                reports.complete(row, bytes_per_us)
                rows.append(row)
                progress.advance(task)
                if args.save or args.out:  # each time: a machine may be taken away
                    path = report.save(args.out, env, method, reports.order(rows), "-decode")
        progress.update(task, description="done")
    rows = reports.order(rows)
    console.print(reports.table(rows, env["device"]))
    for line in reports.notes(rows, how):
        console.print(line, markup=False, highlight=False)
    if path:
        console.print(f"saved to {path}; plot: {decode_plot.draw(path)}", markup=False)


def _rows(args, devices: list, plan: step.Plan, update) -> Iterator[reports.Row]:
    cells = [(batch, context) for batch in args.batches for context in args.contexts]
    peers = _peer_cells(args, devices[0], plan)
    models = [(size, kind, partial(step.random, size, kind)) for size in args.sizes for kind in args.weights]
    if args.gguf:
        longest = plan.size(max(args.contexts))
        models.append((args.gguf.stem, "native", partial(step.of_file, args.gguf, longest)))
    for (name, kind, make), x in itertools.product(models, args.activations):
        update(description=f"{name} {kind}: making the weights")
        of, mesh, note = None, None, None
        try:
            of = step.in_few_arrays(make(x))
            if args.devices > 1:
                of, mesh = step.cut(of, devices)
        except _FAILURES as error:
            note = decode_peers.reason(error)
        for batch, context in cells:
            update(description=f"{name} {kind}, {x} x, batch {batch}, context {context}")
            cell = batch, context, plan.size(context), args.devices
            row = reports.Row(name, kind, x, reports.OURS, *cell, note=note)
            if of is not None:
                row = _measured(row, of, plan, mesh)
            yield row
        del of  # before the next is made
    for library in dict.fromkeys(cell["library"] for cell in peers):
        its = [cell for cell in peers if cell["library"] == library]
        update(description=library)
        for cell, found in zip(its, decode_peers.measure(library, its)):
            yield reports.row(**cell, system=library, **found)


def _measured(row: reports.Row, of: step.Model, plan: step.Plan, mesh) -> reports.Row:
    row.steps_per_call = plan.steps
    row.nbytes = step.bytes_read(of, row.batch, row.context + plan.tokens / 2) // row.devices
    try:
        timed = step.measure(of, row.batch, row.context, plan, mesh)._asdict()
    except _FAILURES as error:
        return dataclasses.replace(row, note=decode_peers.reason(error))
    return dataclasses.replace(row, **timed.pop("split")._asdict(), **timed)


def _peer_cells(args, device, plan: step.Plan) -> list[dict]:
    """What each installed peer is asked for."""
    shared = {"tokens": plan.tokens, "rounds": plan.rounds, "threads": host_systems.THREADS}
    cells = []

    def wanted(library):
        return library not in args.without and decode_peers.installed(library)

    def add(library, model, weights, batches, **rest):
        for batch in batches:
            for context in args.contexts:
                cell = {"library": library, "model": model, "weights": weights, "activations": ""}
                cell["batch"] = batch
                cells.append(cell | {"context": context, "size": plan.size(context)} | shared | rest)

    if device.platform == "gpu" and args.devices == 1 and wanted("torch"):
        for size in args.sizes:
            config = dataclasses.asdict(step.embedded.SIZES[size])
            for kind in _TORCH_WEIGHTS:
                if kind in args.weights:
                    add("torch", size, kind, args.batches, config=config)
    if args.llama_cpp and args.gguf and 1 in args.batches:
        for library in decode_peers.LLAMA_CPP:
            if wanted(library):
                add(library, args.gguf.stem, "native", [1], file=str(args.gguf.resolve()))
    return cells


def _read_limit(device) -> tuple[float | None, str]:
    """(bytes a microsecond that a program reads which does no more, how that was found or why not)"""
    nbytes = _READ[device.platform]
    if device.platform == "gpu":
        library, missing = native.load(device)
        read = library and floor.GpuFloor(native.Native(library, 2 * nbytes), calls=4)
    else:
        library, missing = native.load_reader()
        read = library and floor.CpuFloor(library, host_systems.THREADS, nbytes)
    if read is None:
        return None, f"n/a, {missing}"
    speed = nbytes / read.us(nbytes)
    return speed, f"bytes of weights, keys and values at {speed / 1e3:.0f} GB/s; {read.how}"


def _arguments() -> argparse.Namespace:
    parser = arguments.parser("bench.decode", __doc__)
    words, number, numbers = arguments.words, arguments.number, arguments.numbers
    sizes = f"of {','.join(step.embedded.SIZES)} (default: all, on a CPU 0.5b; none with --gguf)"
    parser.add_argument("--sizes", type=words, metavar="NAME,...", help=sizes)
    parser.add_argument(
        "--weights", type=words, metavar="NAME,...", default=["bf16", "int8", "int4", "nf4"],
        help="of those sizes (default: bf16,int8,int4,nf4; f32, mxfp4, nvfp4, fp8 and mxfp8 too)",
    )  # fmt: skip
    parser.add_argument(
        "--activations", type=words, metavar="NAME,...", default=["exact"],
        help="exact (default), int8, or of a file f32, bf16",
    )  # fmt: skip
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a model with the codes of its file")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], metavar="B,...", help="sequences")
    parser.add_argument(
        "--contexts", type=numbers, default=[128, 4096], metavar="T,...", help="tokens before"
    )
    parser.add_argument("--tokens", type=number, default=64, help="of each sequence in a round (default: 64)")
    parser.add_argument("--rounds", type=number, default=7, help="of which the median counts (default: 7)")
    parser.add_argument(
        "--steps-per-call", type=number, default=1, metavar="N", help="tokens from one program"
    )
    parser.add_argument(
        "--devices", type=number, default=1, metavar="N", help="that have a part of each matrix"
    )
    parser.add_argument("--llama-cpp", action="store_true", help="beside --gguf, by a Python binding")
    parser.add_argument("--without", type=words, default=[], metavar="NAME,...", help="leave these peers out")
    parser.add_argument("--save", action="store_true", help="write to bench/results/<device>-<date>-decode")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the PNG of such a FILE, and no more")
    args = arguments.parse(parser)
    x = step.ACTIVATIONS if args.gguf and not args.sizes else step.decode.LINEAR
    lists = (
        (args.sizes or [], step.embedded.SIZES),
        (args.weights, step.embedded.KINDS),
        (args.activations, x),
    )
    if args.gguf and args.devices > 1:
        parser.error("--gguf is for one device")
    for given, known in lists:
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    return args


if __name__ == "__main__":
    main()
