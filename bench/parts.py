"""Parts around a product, inside the kernel and outside of it: where they cross is in its `choose.h`.

- `python -m bench.parts`: int4 in groups of 128, bfloat16, a decoder layer's products (us, in jit, cold weights)
- `python -m bench.parts --platform cpu --shapes 4096x4096`
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import arguments, environment, native, report, systems, timing
from bench.__main__ import PLANS
from jaxgemv import _ffi, gemv

# What stands around the product; gated ones have twice the rows.
PARTS = {
    "norm": ("norm",),
    "norm, swiglu": ("norm", "swiglu"),
    "residual": ("residual",),
    "gelu, residual": ("gelu", "residual"),
}


@dataclass
class Row:
    n: int
    k: int
    rows: int
    parts: str
    inside_us: float
    outside_us: float


def main() -> None:
    parser = arguments.parser("bench.parts", __doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["28672x4096", "4096x14336", "4096x4096"], metavar="NxK"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--bits", type=int, default=4, choices=range(1, 9), metavar="1-8")
    args = arguments.parse(parser)
    device = jax.devices()[0]
    library = None
    if device.platform == "gpu":
        compiled, missing = native.load(device)
        if compiled is None:
            parser.error(f"no timing: {missing}")
        library = native.Native(compiled, int(PLANS["gpu"].rotate))
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    cells = [(n, k, m, name) for n, k in shapes for m in args.rows for name in PARTS]
    rows = [
        Row(n, k, m, name, *_measure(n, k, m, PARTS[name], args.bits, device, library))
        for n, k, m, name in track(cells, "measuring", console=Console(stderr=True))
    ]
    out = Table(title=f"us on {device.device_kind}, int{args.bits}", title_justify="left")
    for name in ("N x K", "rows", "parts", "inside", "outside"):
        out.add_column(name, justify="left" if name == "parts" else "right")
    for r in rows:
        out.add_row(f"{r.n} x {r.k}", str(r.rows), r.parts, f"{r.inside_us:.2f}", f"{r.outside_us:.2f}")
    Console().print(out)
    if args.out:
        env = environment.environment(device, args.commit, "bench.parts")
        report.save(args.out, env, PLANS[device.platform]._asdict(), rows)


def _measure(n: int, k: int, m: int, parts: tuple[str, ...], bits: int, device, library) -> list[float]:
    plan = PLANS[device.platform]
    make = partial(systems._quantized, n=n, k=k, dtype="bfloat16", bits=bits, group=128)
    weights = [make(seed) for seed in range(plan.copies(n * k * bits // 8))]
    keys = jax.random.split(jax.random.key(0), 3)
    x, norm, residual = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (k,), (m, n)), strict=True)
    )
    arrays = {"norm": norm, "residual": residual}
    arguments = {part: arrays[part] for part in parts if part in arrays}
    activation = next((part for part in parts if part not in arrays), None)

    def product(x, w):
        return gemv(x, w, activation=activation, **arguments)

    platform = "cuda" if device.platform == "gpu" else device.platform
    backend, times = _ffi.backends[platform], []
    for most in (backend.most_rows, 0):
        _ffi.backends[platform] = backend._replace(
            fused_rows=most, epilogue_rows=most, global_scale_rows=most
        )
        jax.clear_caches()
        if library is not None:
            sample = timing.measure_on_device(product, x, weights, plan, library)[1]
        else:
            sample = timing.measure_on_host(product, x, weights, plan, feed=True)[1]
        times.append(sample.us)
    _ffi.backends[platform] = backend
    return times


if __name__ == "__main__":
    main()
