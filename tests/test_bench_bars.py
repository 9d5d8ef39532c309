"""`python -m bench.bars`: every bar is of a product that can be made, and a run says of each whether it is met."""

import json
from functools import partial

import pytest

pytest.importorskip("rich")
pytest.importorskip("bench", reason="the sources are not beside the tests")

from bench import bars, native
from bench.grid_cells import DIMENSIONS, shape_only, weight


@pytest.fixture
def run(run_small):
    return partial(run_small, bars)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_every_bar(platform):
    found = list(bars.bars(platform))
    assert len(found) == len({(cell, of) for cell, of, _ in found})
    for cell, _, bar in found:
        assert weight(cell, shape_only).shape == cell.shape
        assert cell.group in DIMENSIONS["group"]
        assert 1 <= bar <= 3


def test_the_last_dimension_has_the_bars(monkeypatch):
    changes = {"rows": [1, 2], "format": {"int4": 1.5, "fp4": 1.25}}
    monkeypatch.setitem(bars._BARS, "cpu", (("floor", changes),))
    found = [(cell.rows, cell.format, bar) for cell, _, bar in bars.bars("cpu")]
    assert found == [(1, "int4", 1.5), (1, "fp4", 1.25), (2, "int4", 1.5), (2, "fp4", 1.25)]


def test_a_run(run, tmp_path, monkeypatch):
    if missing := native.load_reader()[1]:
        pytest.skip(missing)
    tiny = {"shape": [(64, 256)], "format": {"int4": 1e9, "nf4": 1e-9}}
    monkeypatch.setitem(bars._BARS, "cpu", (("floor", tiny), (bars._DENSE, {"shape": {(24, 128): 1e9}})))
    file = tmp_path / "bars.json"
    assert "2 of 3 met" in run("--out", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {(row["n"], row["format"], row["bar"]) for row in rows} == {
        *((64, "int4", 1e9), (64, "nf4", 1e-9), (24, "int4", 1e9))
    }
    assert all(row["us"] > 0 and not row["wrong"] for row in rows)
    lines = run("--of", str(file)).splitlines()
    assert len(lines) == 2 + len(rows)
    assert [line.endswith(", missed |") for line in lines[2:]].count(True) == 1
