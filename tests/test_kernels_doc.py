"""The table of docs/kernels.md is that of the kernels. `python tests/test_kernels_doc.py` writes it anew."""

import itertools
import re
from pathlib import Path

import pytest
from kernels import FLOATS, ISAS, on

from jaxgemv._config import kernels_text, weights_text
from jaxgemv._ffi import Backend, backends

PAGE = Path(__file__).parent.parent / "docs/kernels.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
# What the page has and this processor may lack.
LACKING = {
    "amx": re.compile(r"\bamx_\w+: [^;|]*; |^\| amx_.*\n", re.MULTILINE),
    "avx512bf16": re.compile(r"\bbf16_\w+: [^;|]*; |^\| bf16_.*\n", re.MULTILINE),
}


def all_backends() -> dict[str, Backend]:
    """On the CPU with the kernels of every instruction set, each before those that it is preferred to."""
    merged = [*backends["cpu"].kernels]
    for isa in ISAS[1:]:
        with on("cpu", isa):
            kernels = backends["cpu"].kernels
        for i, kernel in enumerate(kernels):
            if kernel not in merged:
                later = (merged.index(k) for k in kernels[i + 1 :] if k in merged)
                merged.insert(next(later, len(merged)), kernel)
    return {**backends, "cpu": backends["cpu"]._replace(kernels=tuple(merged))}


def table() -> str:
    """One row for each type of x, the kernels of each backend with the widths they take; and what else these take."""
    backends = all_backends()
    lines = ["| x | " + " | ".join(backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for transposed, x in [*itertools.product((False, True), FLOATS), (False, "int8")]:
        cells = [kernels_text(backend, x, transposed) for backend in backends.values()]
        lines.append(f"| {x}{', gradient' * transposed} | " + " | ".join(cells) + " |")
    lines += ["", "| kernel | weights | operands besides x, packed and scale |", "|---|---|---|"]
    for name, backend in backends.items():
        taken = {}
        for k in backend.kernels:
            x = ", int8 x" if k.x == "int8" else ""
            taken.setdefault((f"{k.name} ({name}{x})", k.format), {}).setdefault(k.operands, set()).add(
                k.bits
            )
        for (kernel, format), widths in taken.items():
            assert sum(map(len, widths.values())) == len(set().union(*widths.values())), (
                f"{kernel}: say of which x"
            )
            for operands, bits in widths.items():
                weights = format if len(widths) == 1 else weights_text(format, sorted(bits))
                lines.append(f"| {kernel} | {weights} | {', '.join(sorted(operands))} |")
    return "\n".join(lines)


def _of_this_processor(text: str) -> str:
    for isa, kernels in LACKING.items():
        text = text if isa in ISAS else kernels.sub("", text)
    return text


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
    if not {"avx2", "avx512", "amx"} & {*ISAS}:
        pytest.skip("the page is of processors with int8_dot")
    page = _of_this_processor(PAGE.read_text())
    assert _written(page) == page, f"python tests/{Path(__file__).name} writes it anew"


if __name__ == "__main__":
    if missing := _missing():
        raise SystemExit(f"needs every backend: {missing}")
    if "amx" not in ISAS:
        raise SystemExit("needs a processor with AMX, whose kernels the table has too")
    PAGE.write_text(_written(PAGE.read_text()))
