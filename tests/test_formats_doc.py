"""What the pages say of formats is their table, and a result. `python tests/test_formats_doc.py` writes it anew."""

import json
import textwrap
from pathlib import Path

import pytest

from jaxgemv._formats import FORMATS

ROOT = Path(__file__).parent.parent
README, PAGE, ROUNDING = ROOT / "README.md", ROOT / "docs/format.md", ROOT / "docs/quantize.md"
BEGIN, END = "<!-- formats: begin -->", "<!-- formats: end -->"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")


def group_of(format) -> str:
    return f"{format.group_size}" if format.group_size else "a row, or as given"


def scale_of(format) -> str:
    return format.scale_dtype.__name__ if format.scale_dtype else "float16, bfloat16 or float32"


def table() -> str:
    lines = ["| format | bits | values | group | scale | of |", "|---|---|---|---|---|---|"]
    for name, format in FORMATS.items():
        scale = scale_of(format) + ", and a global one" * format.global_scale
        values = format.codebook or "float8_e4m3fn"
        lines.append(f"| {name} | {format.bits} | {values} | {group_of(format)} | {scale} | {format.who} |")
    return "\n".join(lines)


def sentence() -> str:
    names = ", ".join(f"{name} ({format.who})" for name, format in FORMATS.items())
    text = f"- Weights: integers of 1 to 8 bits with scale and zero, and by name {names}: `quantize(w, format=...)`."
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def written(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


@pytest.mark.parametrize(("path", "text"), [(README, sentence), (PAGE, table)], ids=["README", "format"])
def test_formats(path, text):
    page = path.read_text()
    assert written(page, text()) == page, f"python tests/{Path(__file__).name} writes it anew"


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_result():
    """The table of docs/quantize.md is that of the result beside the picture, with every format."""
    rounding = pytest.importorskip("bench.rounding")
    if not rounding.OUT.exists():
        pytest.skip("the results are not beside the tests")
    content = json.loads(rounding.OUT.read_text())
    page = ROUNDING.read_text()
    assert rounding.written(page, content) == page, "python -m bench.rounding writes it anew"
    assert [row["format"] for row in content["rows"]] == list(rounding.KINDS)
    assert FORMATS.keys() <= rounding.KINDS.keys()


if __name__ == "__main__":
    README.write_text(written(README.read_text(), sentence()))
    PAGE.write_text(written(PAGE.read_text(), table()))
