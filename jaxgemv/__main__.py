"""What is installed, and whether the kernels are in use: python -m jaxgemv"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxgemv import QuantizedTensor, gemv, show_config
from jaxgemv._ffi import last_kernel

N, K, GROUP = 14336, 4096, 128  # a layer of a Llama 3 8B
_BACKENDS = {"gpu": "cuda", "cpu": "cpu"}


class Plan(NamedTuple):
    """How to keep weights out of caches, and the clock's own time out of the result."""

    dtype: DTypeLike  # of x, and of the dense weight: what XLA is fastest with
    rotate: int  # bytes of weights that pass before the first is read again
    calls: int  # in one program; on a CPU XLA may run several side by side


_PLANS = {"cpu": Plan(jnp.float32, 256 << 20, 1)}
_OTHERS = Plan(jnp.bfloat16, 256 << 20, 32)


def main(arguments: list[str] | None = None) -> None:
    usage = (
        "Prints versions, devices and kernels, and times one product beside XLA's; takes about five seconds."
    )
    argparse.ArgumentParser(prog="python -m jaxgemv", description=usage).parse_args(arguments)
    show_config()
    device = jax.devices()[0]
    plan = _PLANS.get(device.platform, _OTHERS)
    with _steps("Timing a product", 4) as step:
        x, codes, dense = _operands(plan)
        step()
        kernel, reason = _kernel(device.platform, x, codes[0])
        step()
        ours = _microseconds(gemv, x, codes, plan.calls)
        step()
        xla = _microseconds(lambda x, w: jnp.dot(w, x), x, dense, plan.calls)
        step()
    name = jnp.dtype(plan.dtype).name
    rows = (
        (f"jaxgemv, int4 in groups of {GROUP}, {kernel}", ours),
        (f"XLA, dense {name}", xla),
    )
    width = max(len(row) for row, _ in rows)
    print(f"\nOne product of a {N} x {K} weight and a vector of {name}, on {device.device_kind} ({device}):")
    for row, us in rows:
        print(f"  {row:<{width}}  {us:10.1f} us")
    print(f"jaxgemv is {xla / ours:.2g} times as fast.")
    if reason:
        print(f"No kernels are in use: {reason}.")


def _operands(plan: Plan) -> tuple[Array, list[QuantizedTensor], list[Array]]:
    """x, and one weight in both forms, each as often as it takes to fill `rotate` bytes."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (K,), plan.dtype)
    packed = jax.random.bits(key, (N, K // 8), jnp.uint32)
    codes = QuantizedTensor(packed=packed, scale=jnp.full((N, K // GROUP), 0.01, plan.dtype), bits=4)
    dense = jax.jit(lambda w: w.dequantize(plan.dtype))(codes)

    def copies(w) -> list:
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(w))
        return [w, *(jax.tree.map(jnp.copy, w) for _ in range(max(1, plan.rotate // nbytes)))]

    return jax.block_until_ready((x, copies(codes), copies(dense)))


def _kernel(platform: str, x: Array, w: QuantizedTensor) -> tuple[str, str | None]:
    """What a product runs, and why it is not a kernel if it is none."""
    backend = _BACKENDS.get(platform)
    if backend is None:
        return "plain JAX", f"there are none for {platform}"
    try:
        jax.block_until_ready(gemv(x, w, implementation=backend))
    except NotImplementedError as error:
        return "plain JAX", str(error).partition("cannot run: ")[2]
    return f"kernel {last_kernel(backend)}", None


def _microseconds(product: Callable, x: Array, copies: list, calls: int) -> float:
    """The time of one call, the median of some; each call reads the next copy of the weight."""

    @jax.jit
    def program(x, copies):
        y = None
        for w in islice(cycle(copies), max(calls, len(copies))):
            # So that calls run in order, and none is left out.
            x, w = lax.optimization_barrier((x, w))
            x, y = lax.optimization_barrier((x, product(x, w)))
        return y

    groups = cycle([copies] if calls > 1 else [[each] for each in copies])
    count = max(calls, len(next(groups)))

    def seconds(executions: int) -> float:
        start = time.perf_counter()
        for group in islice(groups, executions):
            y = program(x, group)
        jax.block_until_ready(y)
        return time.perf_counter() - start

    seconds(2)  # compiles, and records a CUDA graph
    executions = max(1, min(20, round(20e-3 / seconds(1))))
    times = []
    while len(times) < 3 or (sum(times) < 0.3 and len(times) < 15):
        times.append(seconds(executions))
    return statistics.median(times) / (executions * count) * 1e6


@contextmanager
def _steps(title: str, total: int) -> Iterator[Callable[[], object]]:
    """A progress bar, where rich is there and stderr is a terminal; gives what to call after each step."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        Console = Progress = None
    if Console is None or Progress is None or not sys.stderr.isatty():
        print(f"{title} ...", file=sys.stderr)
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


if __name__ == "__main__":
    main()
