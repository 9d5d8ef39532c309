"""The script that a release asks for its version and its notes."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci/release_notes"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="only in a checkout")

CHANGELOG = "# Changelog\n\n## 1.2.0 (2026-11-30)\n\n- New.\n- More.\n\n## 1.1.0 (2026-10-01)\n\n- Old.\n"


@pytest.fixture
def notes():
    loader = importlib.machinery.SourceFileLoader("release_notes", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release_notes", loader))
    loader.exec_module(module)
    return module.notes


def test_notes(notes):
    for tag in (None, "v1.2.0"):
        assert notes(CHANGELOG, "1.2.0", tag) == "- New.\n- More."


def test_not_dated(notes):
    """Fine until there is a tag."""
    changelog = CHANGELOG.replace("2026-11-30", "unreleased")
    assert notes(changelog, "1.2.0", None) == "- New.\n- More."
    with pytest.raises(
        ValueError, match=r"section '## 1\.2\.0 \(YYYY-MM-DD\)'; got '## 1\.2\.0 \(unreleased\)'"
    ):
        notes(changelog, "1.2.0", "v1.2.0")


@pytest.mark.parametrize(
    ("version", "tag", "message"),
    [
        ("1.2.0", "1.2.0", "the tag must be v1.2.0"),
        ("1.2.0", "v1.2.1", "the tag must be v1.2.0"),
        ("1.1.0", "v1.1.0", "must begin with a section '## 1.1.0"),
        ("1.3.0", None, "got '## 1.2.0"),
    ],
)
def test_of_another_version(notes, version, tag, message):
    with pytest.raises(ValueError, match=message):
        notes(CHANGELOG, version, tag)


@pytest.mark.parametrize("changelog", ["", "# Changelog\n", "## 1.2.0 (unreleased)\n\n## 1.1.0\n\nOld.\n"])
def test_nothing(notes, changelog):
    with pytest.raises(ValueError, match=r"CHANGELOG\.md must"):
        notes(changelog, "1.2.0", None)


def test_of_this_version():
    """The changelog of this checkout has what a release will need."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The first version.") or done.stdout.startswith("- ")
