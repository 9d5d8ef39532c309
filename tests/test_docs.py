"""docs/transformations.md: every claim leads to a test that exists."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs/transformations.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")
def test_links():
    text = PAGE.read_text()
    targets = dict(re.findall(r'^\[([\w-]+)\]: (\S+ "\w+")$', text, re.MULTILINE))
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used
    assert used == targets.keys()
    for target in targets.values():
        path, name = target.split()
        assert f"def {name.strip(chr(34))}(" in (PAGE.parent / path).read_text(), target
