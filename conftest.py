"""The Python in README.md and docs/ runs as tests, beside those of tests/."""

import sys
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# For the sharding in the docs and in the tests; all else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)

# pytest puts the directory of a conftest.py on the path, where jaxgemv has no compiled parts unless the installation is
# editable.
sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md", "docs/*.md"]
).pytest()
