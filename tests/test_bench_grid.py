"""The grid of the benchmark: every pair of values is in it, and a run says of each cell what it found."""

import json
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("allpairspy")
pytest.importorskip("bench", reason="the sources are not beside the tests")

from bench import chain, environment, grid, grid_cells, grid_plot, grid_report, native, report
from bench.grid_cells import DIMENSIONS, SHAPES, Cell
from bench.grid_report import Row

DEVICE = "cpu"
CELLS = [
    Cell("float32", "int4", 32, "zero", "float32", 1, (24, 100)),  # the last group is ragged
    Cell("float32", "int3", None, "none", "16-bit", 70, (24, 100)),
    Cell("bfloat16", "int1", 512, "offset", "16-bit", 3, (8, 67)),
    Cell("bfloat16", "nvfp4", 512, "offset", "16-bit", 2, (8, 67)),
    Cell("float32", "fp8", 32, "zero", "float32", 1, (8, 67)),
]


@pytest.mark.parametrize("platform", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_values_occurs(platform, seed):
    cells = grid_cells.cells(platform, seed, 300, {})
    dimensions = DIMENSIONS | {"shape": SHAPES[platform]}
    assert len(cells) == len(set(cells)) >= 300
    for one, other in combinations(dimensions, 2):
        found = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert found == {(a, b) for a in dimensions[one] for b in dimensions[other]}


def test_all_values_occur_about_as_often():
    cells = grid_cells.cells("gpu", 0, 300, {})
    for name, values in DIMENSIONS.items():
        counts = Counter(getattr(cell, name) for cell in cells)
        assert min(counts.values()) > len(cells) / len(values) / 3, name


def test_seeds():
    cells = [grid_cells.cells("cpu", seed, 300, {}) for seed in (0, 0, 1)]
    assert cells[0] == cells[1] != cells[2]


def test_cells_beyond_the_pairs_share_dense_products():
    dense = [
        {(c.shape, c.dtype, c.rows) for c in grid_cells.cells("gpu", 0, fewest, {})} for fewest in (1, 600)
    ]
    assert dense[0] == dense[1]


def test_chosen_values():
    chosen = {"shape": [(8, 67)], "rows": [1], "dtype": ["float32"], "format": ["int3", "int5"]}
    cells = grid_cells.cells("cpu", 0, 300, chosen)
    assert {(c.shape, c.rows, c.dtype) for c in cells} == {((8, 67), 1, "float32")}
    assert len(cells) == 2 * 6 * 3 * 2  # fewer than asked for: there are no more
    with pytest.raises(SystemExit, match="format"):
        grid_cells.cells("cpu", 0, 300, {"format": []})


@pytest.mark.parametrize("cell", CELLS)
def test_weights_are_what_the_cell_says(cell):
    w = grid_cells.weight(cell, grid_cells.random(cell.bits))
    assert w.shape == cell.shape
    assert w.bits == cell.bits
    cell = cell.made
    assert w.scale.dtype.itemsize == {"float32": 4, "16-bit": 2}.get(cell.scale, 1)
    groups = () if cell.group is None else (-(-cell.shape[1] // cell.group),)
    assert w.scale.shape == (cell.shape[0], *groups)
    given = {name for name in ("zero", "offset") if getattr(w, name) is not None}
    assert given == {cell.shift} - {"none"}
    assert np.isfinite(w.dequantize(np.float32)).all()
    like = grid_cells.weight(cell, grid_cells.shape_only)
    assert jax.tree.structure(w) == jax.tree.structure(like)
    for array, shape in zip(jax.tree.leaves(w), jax.tree.leaves(like)):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)


@pytest.fixture(scope="module")
def small():
    """A grid of CELLS, with next to nothing to empty caches with."""
    library, missing = native.load_reader()
    if library is None:
        pytest.skip(missing)
    plan = chain.Plan(bytes=1e6, flops=1e6, calls=2, flush=1e5, warm_up=1, repeats=2, enough_us=1e6)
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices(DEVICE)[0]):
        patch.setitem(chain.PLANS, DEVICE, plan)
        yield grid.Grid(jax.devices(DEVICE)[0], CELLS)


def test_a_run(small, tmp_path):
    rows = list(small.rows(CELLS, lambda what: None))
    grid_report.complete(rows)
    assert [(r.n, r.k, r.rows, r.format) for r in rows] == [(*c.shape, c.rows, c.format) for c in CELLS]
    for r in rows:
        assert r.note is None
        assert not r.wrong, r.error
        assert r.us is not None
        assert r.dense_us is not None
        assert r.kernel
    method = {**small.method(), "grid": True, "seed": 0, "cells": len(rows), "seconds": 1.0}
    method["summary"] = grid_report.summary(rows)
    assert [s["cells"] for s in method["summary"]] == [4, 1, 0]
    assert len(grid_report.notes(method)) == 6
    env = environment.environment(jax.devices(DEVICE)[0], "commit")
    path = report.save(tmp_path / "grid.json", env, method, rows)
    assert [r["format"] for r in json.loads(path.read_text())["rows"]] == [c.format for c in CELLS]
    picture = grid_plot.draw(path)
    assert picture is None or picture.stat().st_size  # without matplotlib there is none


def test_a_cell_that_cannot_be_measured(small, monkeypatch):
    def refuse(x, w):
        raise NotImplementedError("not today")

    monkeypatch.setattr(grid, "gemv", refuse)
    rows = list(small.rows(CELLS[:1], lambda what: None))
    grid_report.complete(rows)
    assert [r.note for r in rows] == ["NotImplementedError: not today"]
    assert "not today" in _text(grid_report.problem_table(rows))


def _row(rows: int, us: float, dense_us: float, error: float = 0) -> Row:
    row = Row(8, 8, rows, "float32", "int4", 32, "zero", "float32", us=us, dense_us=dense_us, error=error)
    grid_report.complete([row])
    return row


@pytest.mark.parametrize(
    ("rows", "us", "dense_us", "loses"),
    [
        (1, 11, 10, True),
        (64, 10.4, 10, False),  # by 4%
        (1, 1.4, 1, False),  # by 0.4 us
        (65, 11.9, 10, False),
        (1024, 12.1, 10, True),
        (2048, 11.1, 10, True),
        (2048, 10.9, 10, False),
    ],
)
def test_what_loses(rows, us, dense_us, loses):
    assert _row(rows, us, dense_us).loses == loses


def test_tables():
    rows = [_row(1, 2, 1), _row(2, 30, 10), _row(65, 1, 1, float("nan"))]
    text = _text(grid_report.losing_table(rows, "a device"))
    assert text.index("3.00") < text.index("2.00")  # worst first
    assert "WRONG" in _text(grid_report.problem_table(rows))
    assert [(s["cells"], s["losing"], s["wrong"]) for s in grid_report.summary(rows)] == [
        (2, 2, 0),
        (1, 0, 1),
        (0, 0, 0),
    ]
    assert grid_report.summary_table(rows).row_count == 3


def _text(table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_native_parts_compile():
    """For a GPU that need not be there."""
    if native.nvcc() is None:
        pytest.skip("no nvcc")
    library, missing = native.load(SimpleNamespace(compute_capability="9.0"))
    assert library is not None, missing
    assert all(hasattr(library, name) for name in (native.START, native.STOP, "jaxgemv_bench_reads"))
