"""Links: of docs/transformations.md to tests that exist, of README.md, which the site does not have, and the files that
CONTRIBUTING.md names."""

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


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")
def test_contributing():
    """Every source that it names exists, where it says or in a folder of that name."""
    named = set(re.findall(r"`([\w./]+\.(?:cuh?|h|cc|py))`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    folders = "csrc", "jaxgemv", "tests", "bench", "examples"
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
