"""Every public function and class has a docstring with an example, which runs, and an entry in the API's pages."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# And what the examples need besides.
MODULES = {
    "jaxgemv": None,
    "jaxgemv.reference": None,
    "jaxgemv.attention": None,
    "jaxgemv.codebooks": None,
    "jaxgemv.formats": "safetensors",
    "jaxgemv.flax.linen": "flax",
    "jaxgemv.flax.nnx": "flax",
    "jaxgemv.qwix": "qwix",
}


def offered(module: str) -> list[str]:
    """The names of a module that are not for itself: defined there, in `__all__`, or imported `as` what they are."""
    names = []
    for node in ast.parse(Path(importlib.util.find_spec(module).origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
    return [f"{module}.{name}" for name in names if not name.startswith("_") and not name.isupper()]


NAMES = [name for module in MODULES for name in offered(module) if name not in MODULES]


def load(name: str):
    module, _, attribute = name.rpartition(".")
    if needed := MODULES.get(name, MODULES.get(module)):
        pytest.importorskip(needed)
    if name in MODULES:
        return importlib.import_module(name)
    return getattr(importlib.import_module(module), attribute)


def examples(thing, name: str) -> list[doctest.DocTest]:
    """Of a module itself, of a function, or of a class and its methods."""
    finder = doctest.DocTestFinder(recurse=not inspect.ismodule(thing))
    return [test for test in finder.find(thing, name, module=False, globs={}) if test.examples]


@pytest.mark.parametrize("name", [*MODULES, *NAMES])
def test_examples(name):
    thing = load(name)
    tests = examples(thing, name)
    assert thing.__doc__
    assert name in MODULES or name in [test.name for test in tests], "an example is missing"
    runner, output = doctest.DocTestRunner(optionflags=FLAGS, verbose=False), []
    for test in tests:
        runner.run(test, out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


@pytest.mark.parametrize("name", NAMES)
def test_methods(name):
    thing = load(name)
    methods = vars(thing) if inspect.isclass(thing) else {}
    for method, value in methods.items():
        is_ours = getattr(value, "__module__", "jaxgemv").startswith("jaxgemv")  # and not a field's default
        is_public = method == "__call__" or not method.startswith("_")
        if is_public and is_ours and isinstance(value, classmethod | property | FunctionType):
            assert value.__doc__, f"{name}.{method}"


@pytest.mark.skipif(not DOCS.exists(), reason="the docs are not beside the tests")
def test_pages():
    pages = "".join(path.read_text() for path in DOCS.glob("api*.md"))
    assert {*NAMES} <= {*re.findall(r"(?:::| {8}) (jaxgemv[\w.]+)", pages)}
