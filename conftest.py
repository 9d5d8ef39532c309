"""The Python in README.md and docs/ runs as tests, beside those of tests/."""

import doctest

import pytest

try:
    import jaxgemv  # noqa: F401
except ImportError as error:  # one line that says what to do
    raise pytest.UsageError(str(error)) from None

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# For the sharding in the docs and in the tests; all else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)
# So that errors are their messages alone, as the docs show them.
jax.config.update("jax_traceback_filtering", "off")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()


# The blocks of a page follow one another: each first runs those before it that another process of pytest-xdist has had.


def pytest_collection_modifyitems(items):
    pages = {}
    for item in items:
        if item.path.suffix == ".md":
            page = pages.setdefault(item.path, [])
            item.stash[_BEFORE] = list(page)
            page.append(item)


_BEFORE, _HAS_RUN = pytest.StashKey(), pytest.StashKey()


def pytest_runtest_call(item):
    item.stash[_HAS_RUN] = True
    for earlier in item.stash.get(_BEFORE, ()):
        if not earlier.stash.get(_HAS_RUN, False):
            earlier.stash[_HAS_RUN] = True
            earlier.example.evaluate()
