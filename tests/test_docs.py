"""Links: of docs/transformations.md to tests that exist, of README.md, which the site does not have, and the files that
CONTRIBUTING.md names. What README.md counts."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE, README = ROOT / "docs/transformations.md", ROOT / "README.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")


def test_transformations():
    """Every claim leads to a test."""
    text = PAGE.read_text()
    targets = dict(re.findall(r'^\[([\w-]+)\]: (\S+ "\w+")$', text, re.MULTILINE))
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used
    assert used == targets.keys()
    for target in targets.values():
        path, name = target.split()
        assert f"def {name.strip(chr(34))}(" in (PAGE.parent / path).read_text(), target


def slugs(page: Path) -> set[str]:
    """Of the headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.skipif(not (ROOT / "bench/results").exists(), reason="the results are not beside the tests")
def test_readme():
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", README.read_text())
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not heading or heading in slugs(ROOT / path), link


@pytest.mark.skipif(not (ROOT / "bench/results").exists(), reason="the results are not beside the tests")
def test_losing_products():
    """The README counts those of the grids that docs/performance.md shows last for a machine."""
    shown = re.findall(r"results/([\w.-]+-grid[\w-]*)\.png", (ROOT / "docs/performance.md").read_text())

    def counts(machine):
        """Up to 64 rows and with more: products that lose, and all."""
        file = [name for name in shown if name.startswith(machine)][-1]
        rows = json.loads((ROOT / f"bench/results/{file}.json").read_text())["rows"]
        parts = ([r["loses"] for r in rows if (r["rows"] <= 64) == few] for few in (True, False))
        return [(sum(part), len(part)) for part in parts]

    sentence = (
        r"(\d+) take longer on two cores of an AMD EPYC, (\d+) on two of an Intel Xeon with AMX, and (\d+) on an "
        r"H200: (\d+) of (\d+) with up to 64 rows, [^,]*, and (\d+) of (\d+) with more"
    )
    said = [int(n) for n in re.search(sentence, " ".join(README.read_text().split())).groups()]
    each = [counts(machine) for machine in ("amd-epyc-2", "intel-xeon-2", "nvidia-h200")]
    totals = [sum(losing for losing, _ in parts) for parts in each]
    assert said == [*totals, *(n for part in each[-1] for n in part)]


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")
def test_contributing():
    """Every source that it names exists, where it says or in a folder of that name."""
    named = set(re.findall(r"`([\w./]+\.(?:cuh?|h|cc|py))`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    folders = "csrc", "jaxgemv", "tests", "bench", "examples"
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_titles(backend):
    """The sections that the rules for kernels name as where they come from are there."""
    page = (ROOT / f"docs/{backend}-notes.md").read_text()
    headings = re.findall(r"^(?:#+ |- \*\*|\*\*)(.+)$", page, re.MULTILINE)
    rules = [ROOT / "csrc" / backend / name for name in ("choose.h", "limits.h")]
    text = "".join(file.read_text() for file in rules if file.exists())
    titles = set(re.findall(r'"([A-Z][^"]+)"', re.sub(r"\n *// ", " ", text)))
    assert titles
    begins = [re.compile(re.escape(title) + r"(?! \w)") for title in titles]
    assert not [title.pattern for title in begins if not any(map(title.match, headings))]


@pytest.mark.skipif(not (ROOT / "bench/results").exists(), reason="the results are not beside the tests")
def test_results():
    """Each is named where someone reads of it."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.svg")]
    code = [
        *(ROOT / "tests").glob("*.py"),
        *(ROOT / "bench").glob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    text = "".join(file.read_text() for file in (*pages, *code))
    assert not [file.name for file in (ROOT / "bench/results").iterdir() if file.name not in text]
