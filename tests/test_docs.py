"""docs/transformations.md: every claim leads to a test that exists, and its code runs."""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parent.parent / "docs/transformations.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")


def test_links():
    text = PAGE.read_text()
    targets = dict(re.findall(r'^\[([\w-]+)\]: (\S+ "\w+")$', text, re.MULTILINE))
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used
    assert used == targets.keys()
    for target in targets.values():
        path, name = target.split()
        assert f"def {name.strip(chr(34))}(" in (PAGE.parent / path).read_text(), target


@pytest.mark.skipif(len(jax.devices()) < 8, reason="the code is for eight devices")
def test_code():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
