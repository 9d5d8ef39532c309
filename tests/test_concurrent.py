"""Several threads, and several devices, at once: nothing is shared that could be mixed up."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

from jaxgemv import gemv

ROUNDS = 20
# Each thread its own kernel, size and number of rows.
CASES = (
    (4, Case(1, 1024, 512, 128, "zero")),
    (4, Case(8, 96, 2048, 64, "offset", bias=True)),
    (3, Case(2, 257, 384, "row", "mid")),
    (8, Case(33, 64, 1024, 128, "zero")),
)
compiled = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)


def check(devices: list, backend: str, rng) -> None:
    """One thread for each case, all starting together, on these devices in turn."""
    start = Barrier(len(CASES))

    def work(number, problem):
        x, w, bias = jax.device_put((problem.x, problem.tensor, problem.bias), devices[number % len(devices)])

        @jax.jit
        def f(x, w, bias):
            return gemv(x, w, bias=bias, implementation=backend)

        f(x, w, bias).block_until_ready()
        start.wait()
        # Enqueued without a look at the results, so that as many as can are under way.
        return [f(x * (-1) ** i, w, bias) for i in range(ROUNDS)]

    problems = [make(rng, bits, "float32", case, exact=True) for bits, case in CASES]
    with ThreadPoolExecutor(len(CASES)) as pool:
        results = [*pool.map(work, range(len(CASES)), problems)]
    for p, ys in zip(problems, results):
        bias = 0 if p.bias is None else p.bias
        for i, y in enumerate(ys):
            np.testing.assert_array_equal(y, (p.answer() - bias) * (-1) ** i + bias)


@compiled
def test_threads(backend, rng):
    """On one device."""
    check([jnp.zeros(()).device], backend, rng)


@compiled
def test_devices(backend, rng):
    devices = jax.devices(backend)
    if len(devices) < 2:
        pytest.skip("one device")
    check(devices[:2], backend, rng)


@compiled
def test_two_calls_that_do_not_wait_for_each_other(backend, rng):
    """In one program XLA may run them side by side."""
    problems = [make(rng, bits, "float32", case, exact=True) for bits, case in CASES]

    @jax.jit
    def f(problems):
        return [gemv(x, w, bias=bias, implementation=backend) for x, w, bias in problems]

    args = [(p.x, p.tensor, p.bias) for p in problems]
    for _ in range(ROUNDS):
        for y, p in zip(f(args), problems):
            np.testing.assert_array_equal(y, p.answer())
