"""The README's support matrix is the kernel tables, and its first code block runs."""

import itertools
import re
from pathlib import Path

import pytest

from jaxgemv._ffi import backends

README = Path(__file__).parent.parent / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="the README is not beside the tests")


def support_matrix() -> str:
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
    return "\n".join(lines)


def _ranges(bits: list[int]) -> str:
    whole = bits == list(range(bits[0], bits[-1] + 1)) and len(bits) > 2
    return f"{bits[0]} to int{bits[-1]}" if whole else ", int".join(map(str, bits))


def test_support_matrix():
    if missing := [b.missing for b in backends.values() if b.missing]:
        pytest.skip(f"needs every backend: {missing}")
    # The CPU's kernels are named after the best instruction set of the processor.
    here = re.sub(
        r"(amx|avx512|avxvnni|avx2|portable):", "amx, avx512, avxvnni, avx2 or portable:", support_matrix()
    )
    assert here in README.read_text()


def test_first_code_block():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    exec(compile(code, str(README), "exec"), {})
