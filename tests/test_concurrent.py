"""Several threads, and several devices, at once: nothing is shared that could be mixed up."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import compiled
from problems import Case, make

from jaxgemv import gemv

ROUNDS = 20
THREADS = 8
# Each thread its own kernel, size and number of rows.
CASES = (
    (4, "bfloat16", Case(1, 1024, 512, 128, "zero")),
    (4, "float16", Case(8, 96, 2048, 64, "offset", bias=True)),
    (3, "float32", Case(2, 257, 384, "row", "mid")),
    (8, "bfloat16", Case(33, 256, 1024, 128, "zero")),
)


class Work(NamedTuple):
    """A product and a cotangent of its result, as arguments of `both`; and what they make."""

    args: tuple
    y: np.ndarray
    dx: np.ndarray
    bias: np.ndarray | int


def problem(rng, bits: int, x: str, case: Case) -> Work:
    p = make(rng, bits, x, case, exact=True)
    ct = rng.integers(-2, 3, (case.m, case.n)).astype(np.float32)
    bias = 0 if p.bias is None else np.asarray(p.bias, np.float64)
    dx = (ct @ p.weight()).astype(p.x.dtype)
    return Work((p.x, p.tensor, p.bias, ct), p.answer(), dx, bias)


def both(backend: str, x, w, bias, ct):
    """The product, and the transposed one, which has no need to wait for it."""
    y, vjp = jax.vjp(lambda x: gemv(x, w, bias=bias, out_dtype="float32", implementation=backend), x)
    return y, *vjp(ct)


def same(results, work: Work, sign: int = 1) -> None:
    y, dx = results
    np.testing.assert_array_equal(y, (work.y - work.bias) * sign + work.bias)
    np.testing.assert_array_equal(dx, work.dx * np.asarray(sign, work.dx.dtype))


def check(devices: list, backend: str, rng) -> None:
    """Two threads for each case, all starting together, on these devices in turn."""
    start = Barrier(THREADS)

    def run(number, work):
        x, w, bias, ct = jax.device_put(work.args, devices[number % len(devices)])
        f = jax.jit(partial(both, backend))
        jax.block_until_ready(f(x, w, bias, ct))
        start.wait()
        # Enqueued without a look at the results, so that as many as can are under way.
        return [f(x * (-1) ** i, w, bias, ct * (-1) ** i) for i in range(ROUNDS)]

    problems = [problem(rng, *CASES[number % len(CASES)]) for number in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        results = [*pool.map(run, range(THREADS), problems)]
    for work, rounds in zip(problems, results):
        for i, result in enumerate(rounds):
            same(result, work, (-1) ** i)


@compiled
def test_threads(backend, rng):
    """On one device."""
    check([jnp.zeros(()).device], backend, rng)


@compiled
def test_devices(backend, rng):
    devices = jax.devices(backend)
    if len(devices) < 2:
        pytest.skip("one device")
    check(devices[:THREADS], backend, rng)


@compiled
@pytest.mark.parametrize(("bits", "x", "case"), CASES, ids=str)
def test_one_call_by_many_threads(backend, bits, x, case, rng):
    """The same program and the same arrays."""
    work = problem(rng, bits, x, case)
    args = jax.device_put(work.args)
    f = jax.jit(partial(both, backend)).lower(*args).compile()
    start = Barrier(THREADS)

    def run(_):
        start.wait()
        return [f(*args) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        for rounds in pool.map(run, range(THREADS)):
            for result in rounds:
                same(result, work)


@compiled
def test_calls_that_do_not_wait_for_each_other(backend, rng):
    """In one program XLA may run them side by side."""
    problems = [problem(rng, *case) for case in CASES]

    @jax.jit
    def f(problems):
        return [both(backend, *args) for args in problems]

    for _ in range(ROUNDS):
        for result, work in zip(f([work.args for work in problems]), problems):
            same(result, work)


ONE_THREAD = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the processors
import jax
import numpy as np
from test_concurrent import CASES, both, problem, same
jax.config.update("jax_num_cpu_devices", 1)
for case in CASES:
    work = problem(np.random.default_rng(0), *case)
    same(both("cpu", *work.args), work)
print("right")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot choose its processors")
def test_one_thread():
    """XLA's pool has no other that could take a share of the work."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD],
        cwd=Path(__file__).parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
