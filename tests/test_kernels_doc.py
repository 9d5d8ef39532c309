"""The table of docs/kernels.md is that of the kernels. `python tests/test_kernels_doc.py` writes it anew."""

import itertools
import re
from pathlib import Path

import pytest

from jaxgemv._ffi import backends

PAGE = Path(__file__).parent.parent / "docs/kernels.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# The CPU's kernels have the name of the best instruction set of the processor.
LEVELS = re.compile(r"\b(amx|avx512|avxvnni|avx2|portable):")


def table() -> str:
    """One row for each type of x, the kernels of each backend with the widths they take."""
    lines = ["| x | " + " | ".join(backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for transposed, x in itertools.product((False, True), ("float16", "bfloat16", "float32")):
        cells = []
        for backend in backends.values():
            kernels = [k for k in backend.kernels if (k.x, k.transposed) == (x, transposed)]
            names = dict.fromkeys(k.name for k in kernels)
            widths = {n: sorted({k.bits for k in kernels if k.name == n}) for n in names}
            cells.append("; ".join(f"{n}: int{_ranges(bits)}" for n, bits in widths.items()))
        lines.append(f"| {x}{', gradient' * transposed} | " + " | ".join(cells) + " |")
    return LEVELS.sub("amx, avx512, avxvnni, avx2 or portable:", "\n".join(lines))


def _ranges(bits: list[int]) -> str:
    whole = bits == list(range(bits[0], bits[-1] + 1)) and len(bits) > 2
    return f"{bits[0]} to int{bits[-1]}" if whole else ", int".join(map(str, bits))


def _written(page: str) -> str:
    """The page with the table of the kernels that are built."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _missing() -> list[str]:
    return [f"{name} is {backend.missing}" for name, backend in backends.items() if backend.missing]


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")
def test_table():
    if missing := _missing():
        pytest.skip(f"needs every backend: {missing}")
    page = PAGE.read_text()
    assert _written(page) == page, f"python tests/{Path(__file__).name} writes it anew"


if __name__ == "__main__":
    if missing := _missing():
        raise SystemExit(f"needs every backend: {missing}")
    PAGE.write_text(_written(PAGE.read_text()))
