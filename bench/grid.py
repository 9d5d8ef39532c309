"""`python -m bench --grid`: a few hundred products of every kind, each beside XLA's dense one. Where do we lose?"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

from bench import chain, floor, host_systems, native, systems
from bench.grid_cells import Cell, random, shape_only, total_bytes, weight
from bench.grid_report import Row, complete, loses
from bench.measure import nbytes
from jaxgemv import _ffi, gemv

_SAMPLED = 8, 256  # rows of x, rows of the weight: where results are checked
_TURNS = 3  # that a cell which seems to lose has with XLA


def copies(tree, count: int) -> list:
    return [jax.tree.map(jnp.array, tree) for _ in range(count)]


def _error(x, w, y):
    """Relative, of a sample of y, against the dequantised weight in float32."""
    rows, columns = (np.unique(np.linspace(0, n - 1, most).astype(int)) for n, most in zip(y.shape, _SAMPLED))
    x, w = x[rows].astype(jnp.float32), w[columns].dequantize(jnp.float32)
    expected = jnp.sum(x[:, None] * w, axis=-1)  # not a dot, of which XLA would try variants
    difference = y[np.ix_(rows, columns)].astype(jnp.float32) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


class Grid:
    """What all cells have in common: the stopwatch, the read floor, the time of a link."""

    def __init__(self, device, cells: list[Cell]):
        self.device, self.plan = device, chain.PLANS[device.platform]
        self._gpu = device.platform == "gpu"
        largest = max(total_bytes(c) for c in cells)
        library, missing = native.load(device) if self._gpu else native.load_reader()
        if library is None:
            raise SystemExit(f"bench: --grid needs a compiler; {missing}")
        if self._gpu:
            self.clock = native.Native(library, int(self.plan.flush + largest))
            self.floor = floor.GpuFloor(self.clock, self.plan.calls)
        else:
            self.clock = native.HostClock(library, int(self.plan.flush))
            self.floor = floor.CpuFloor(library, host_systems.THREADS, int(max(self.plan.flush, largest)))
        dtypes = sorted({c.dtype for c in cells})
        self.link_us = {dtype: chain.link_us(dtype, self.clock, self.plan) for dtype in dtypes}

    def rows(self, cells: list[Cell], starts: Callable) -> Iterator[Row]:
        """One for each cell. starts: is told what comes next."""
        with ThreadPoolExecutor(min(16, host_systems.THREADS)) as pool:
            for (n, k), of_shape in groupby(cells, lambda c: c.shape):
                starts(f"{n} x {k}, compiling")
                alike = [_Alike(self, list(group), pool) for _, group in groupby(of_shape, lambda c: c.dtype)]
                for each in alike:  # all of them first: nothing compiles while something is timed
                    each.wait()
                while alike:
                    starts(f"{n} x {k}, x {alike[0].dtype}")
                    yield from alike.pop(0).rows()  # whose memory is then free

    def method(self) -> dict:
        """How all was measured."""
        return {**self.plan._asdict(), "link_us": self.link_us, "floor": self.floor.how}

    def time(self, compiled, x, weights, dtype: str):
        return chain.measure(compiled, x, weights, self.clock, self.plan, self.link_us[dtype])

    def kernel(self, compiled) -> str:
        """What ran last: a kernel's name, or XLA."""
        if _ffi.TARGET not in compiled.as_text():
            return "XLA"
        return _ffi.last_kernel("cuda" if self._gpu else "cpu")


class _Alike:
    """Cells of one shape and type of x: they share XLA's dense products. Threads of the pool compile."""

    def __init__(self, grid: Grid, cells: list[Cell], pool):
        self.grid, self.cells = grid, cells
        self.dtype, (n, k) = cells[0].dtype, cells[0].shape
        x = self._normal((max(c.rows for c in cells), k))
        self.x = {c.rows: jax.device_put(x[: c.rows], grid.device) for c in cells}
        plan, scratch, matrix = grid.plan, grid.clock.scratch, shape_only("", (n, k), self.dtype)
        self.dense_counts = {c.rows: plan.count(nbytes(matrix), c.flops) for c in cells}
        self.dense_programs = {
            m: pool.submit(chain.program, systems.dot, self.x[m], [matrix] * count, scratch)
            for m, count in self.dense_counts.items()
        }
        self.dense_us: dict[int, float] = {}
        self.programs, self.counts = [], []
        for c in cells:
            w, y = weight(c, shape_only), shape_only("", (c.rows, n), self.dtype)
            count = plan.count(sum(map(nbytes, jax.tree.leaves(w))), c.flops)
            self.counts.append(count)
            ours = pool.submit(chain.program, gemv, self.x[c.rows], [w] * count, scratch)
            check = pool.submit(lambda *each: jax.jit(_error).lower(*each).compile(), self.x[c.rows], w, y)
            self.programs.append((ours, check))

    def wait(self) -> None:
        wait((*self.dense_programs.values(), *(future for each in self.programs for future in each)))

    def rows(self) -> Iterator[Row]:
        for cell, programs, count in zip(self.cells, self.programs, self.counts):
            n, k = cell.shape
            row = Row(n, k, cell.rows, *cell.made[:5])
            try:
                self._fill(row, cell, *(p.result() for p in programs), count)
            except (RuntimeError, TypeError, ValueError, MemoryError) as error:
                # Out of memory, say: the other cells are still worth having.
                row.note = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield row

    def _fill(self, row: Row, cell: Cell, program, check, count: int) -> None:
        grid, x = self.grid, self.x[cell.rows]
        row.floor_us = grid.floor.us(total_bytes(cell))
        weights = copies(weight(cell, random(cell.bits)), count)
        y, sample = grid.time(program, x, weights, self.dtype)
        row.us, row.spread, row.calls = sample.us, sample.spread, sample.calls
        row.error, row.kernel = float(check(x, weights[0], y)), grid.kernel(program)
        if cell.rows not in self.dense_us:
            self.dense_us[cell.rows] = self._dense(cell.rows)
        row.dense_us = self.dense_us[cell.rows]
        if loses(row):
            # A second look at both, in turns: the machine may have had something else to do.
            slow = row.us * count > grid.plan.enough_us
            turns = [
                (grid.time(program, x, weights, self.dtype)[1].us, self._dense(cell.rows))
                for _ in range(1 if slow else _TURNS)
            ]
            row.us, row.dense_us = map(min, zip(*turns))

    def _normal(self, shape: tuple[int, int]):
        return random(bits=0)("normal", shape, self.dtype)

    @cached_property
    def dense_weights(self) -> list:
        return copies(self._normal(self.cells[0].shape), max(self.dense_counts.values()))

    def _dense(self, m: int) -> float:
        weights = self.dense_weights[: self.dense_counts[m]]
        return self.grid.time(self.dense_programs[m].result(), self.x[m], weights, self.dtype)[1].us


def run(device, cells: list[Cell], progress, task) -> tuple[list[Row], dict]:
    """(a row for each cell, how it was measured). An interrupt ends it with the rows that there are."""
    began = time.perf_counter()
    grid = Grid(device, cells)
    rows = []
    with suppress(KeyboardInterrupt):
        for row in grid.rows(cells, lambda what: progress.update(task, description=what)):
            rows.append(row)
            progress.advance(task)
    complete(rows)
    seconds = round(time.perf_counter() - began, 1)
    return rows, {**grid.method(), "seconds": seconds}
