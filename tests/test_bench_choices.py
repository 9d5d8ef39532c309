"""`python -m bench.choices`: kernels beside the chosen one, and what the rules alone choose."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("bench", reason="the sources are not beside the tests")

from bench import choices, native
from bench.choices import Choice

RESULTS = Path(choices.__file__).parent / "results"


@pytest.fixture
def run(run_small):
    return partial(run_small, choices)


@pytest.fixture
def chooser():
    for backend in ("cpu", "cuda"):
        missing = native.load_chooser(backend)[1]
        if missing and "failed" not in missing:
            pytest.skip(missing)


def test_cells():
    found, again, others = (list(choices.cells("gpu", 50, seed, {})) for seed in (0, 0, 1))
    assert found == again != others
    assert all(0.9 * 2**20 <= math.prod(cell.shape) <= 2**26 for cell in found)
    chosen = {"shape": [(24, 128)], "rows": [3], "format": ["int3", "nvfp4"]}
    cells = choices.cells("cpu", 20, 0, chosen)
    assert {(c.shape, c.rows, c.format) for c in cells} == {((24, 128), 3, "int3"), ((24, 128), 3, "nvfp4")}


def test_a_run(run, chooser, tmp_path):
    """What the rules choose, of the kernels that ran, is what was chosen."""
    file = tmp_path / "choices.json"
    options = "--shapes", "24x128", "64x300", "512x1024", "--rows", "1", "3", "17"
    text = run("--count", "12", "--out", str(file), *options)
    assert "12 products" in text
    saved = json.loads(file.read_text())
    assert saved["method"]["summary"]["products"] == 12
    for row in saved["rows"]:
        assert row["chosen"] in row["us"]
        assert min(row["us"].values()) > 0
    choose = choices.Chooser("cpu")
    assert [choose(Choice(**row)) for row in saved["rows"]] == [row["chosen"] for row in saved["rows"]]
    assert run("--of", str(file)).splitlines()[-1] == text.splitlines()[-1]


def test_an_interrupt_leaves_what_was_measured(run, tmp_path, monkeypatch):
    measure, done = choices.measure, []

    def once(*args):
        if done:
            raise KeyboardInterrupt
        done.append(measure(*args))
        return done[0]

    monkeypatch.setattr(choices, "measure", once)
    file = tmp_path / "choices.json"
    assert "1 products" in run("--count", "3", "--out", str(file), "--shapes", "24x128", "--rows", "1")
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_summary():
    product = 8, 8, 1, "float16", "int4", 8, "none", "float32"
    fast, slow = (Choice(*product, chosen=name, us={"a": 1.0, "b": 4.0}) for name in "ab")
    found = choices.summary([fast, slow])
    assert found == {"products": 2, "geometric_mean": pytest.approx(2.0), "missed": 1, "worst": 4.0}
    assert choices.table([fast, slow]).row_count == 1


@pytest.mark.parametrize(
    ("backend", "file", "mean", "worst"),
    [
        ("cuda", "nvidia-h100-2026-11-26-choices.json", 1.02, 1.6),
        ("cuda", "nvidia-h200-2026-11-29-choices.json", 1.02, 1.6),
        ("cuda", "nvidia-h200-2026-11-28-choices-tables.json", 1.015, 1.45),
        ("cuda", "nvidia-h200-2026-11-28-choices-e2m1.json", 1.01, 1.1),
        ("cuda", "nvidia-h200-2026-11-28-choices-few-rows.json", 1.015, 1.7),
        ("cuda", "nvidia-h200-2026-11-27-choices-widths-few-rows.json", 1.025, 1.45),
        ("cuda", "nvidia-h200-2026-11-27-choices-widths-many-rows.json", 1.015, 1.25),
        ("cpu", "intel-xeon-2-cores-2026-11-26-choices.json", 1.02, 1.8),
        ("cpu", "amd-epyc-2-cores-2026-11-29-choices.json", 1.01, 1.35),
        ("cpu", "intel-xeon-2-cores-2026-11-30-choices-amx.json", 1.03, 1.5),
        ("cuda", "nvidia-h200-2026-11-30-choices-many-rows.json", 1.02, 1.2),
        ("cuda", "nvidia-h200-2026-11-30-choices-refit.json", 1.012, 1.75),
        ("cuda", "nvidia-h200-2026-11-30-choices-long-rows.json", 1.01, 1.1),
        ("cuda", "nvidia-h200-2026-11-30-choices-float32.json", 1.02, 1.4),
        ("cuda", "nvidia-h200-2026-11-30-choices-short-rows.json", 1.01, 1.1),
        ("cuda", "nvidia-h200-2026-11-30-choices-short-rows-float32.json", 1.01, 1.1),
    ],
)
def test_rules_choose_what_was_fast(backend, file, mean, worst, chooser):
    """Kernels that have become faster since then want new times."""
    choose = choices.Chooser(backend)
    recorded = [Choice(**row) for row in json.loads((RESULTS / file).read_text())["rows"]]
    for choice in recorded:
        choice.chosen = choose(choice)
    found = choices.summary(recorded)
    assert found["geometric_mean"] < mean
    assert found["worst"] < worst


def test_a_compiler_is_needed(monkeypatch):
    monkeypatch.setattr(native, "load_chooser", lambda backend: (None, "no C++ compiler"))
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler"):
        choices.Chooser("cuda")
