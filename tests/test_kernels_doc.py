"""The table of docs/kernels.md is that of the kernels. `python tests/test_kernels_doc.py` writes it anew."""

import itertools
import re
from pathlib import Path

import pytest

from jaxgemv._config import kernels_text
from jaxgemv._ffi import backends

PAGE = Path(__file__).parent.parent / "docs/kernels.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# The CPU's kernels have the name of the best instruction set of the processor.
LEVELS = re.compile(r"\b(amx|avx512|avxvnni|avx2|portable):")


def table() -> str:
    """One row for each type of x, the kernels of each backend with the widths they take."""
    lines = ["| x | " + " | ".join(backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for transposed, x in itertools.product((False, True), ("float16", "bfloat16", "float32")):
        cells = [kernels_text(backend, x, transposed) for backend in backends.values()]
        lines.append(f"| {x}{', gradient' * transposed} | " + " | ".join(cells) + " |")
    kernels = [kernel for backend in backends.values() for kernel in backend.kernels]
    lines += [
        "",
        f"Besides x, packed and scale all kernels take {_common(kernels, False)}; those for gradients",
    ]
    lines += [f"{_common(kernels, True)}.", "What else a call has is done around them, or by plain JAX."]
    return LEVELS.sub("amx, avx512, avxvnni, avx2 or portable:", "\n".join(lines))


def _common(kernels, transposed: bool) -> str:
    """The operands that each of them takes; a kernel with more needs words of its own."""
    sets = {kernel.operands for kernel in kernels if kernel.transposed == transposed}
    assert len(sets) == 1, "not all kernels take the same operands: say which do"
    *first, last = sorted(*sets)
    return f"{', '.join(first)} and {last}"


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
