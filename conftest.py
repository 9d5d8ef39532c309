"""The Python in README.md and docs/ runs as tests, beside those of tests/."""

import pytest

try:
    import jaxgemv  # noqa: F401
except ImportError as error:  # one line that says what to do
    raise pytest.UsageError(str(error)) from None

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# For the sharding in the docs and in the tests; all else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]).pytest()
