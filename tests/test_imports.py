"""Modules import one way, and `import jaxgemv` needs jax and numpy alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxgemv

ROOT = Path(jaxgemv.__file__).parent

# A module may import those of the levels above its own.
LEVELS = (
    {"_extensions", "_shapes"},
    {"_operands", "_check", "_rounding", "codebooks"},
    {"_ffi", "_format", "_formats", "_around", "_grouped"},
    {"_tensor", "_reference", "_dispatch"},
    {"_quantize", "_arguments", "_sharding", "_many_rows"},
    {"_ways"},
    {"_primitive", "_tree"},
    {"_ops", "_activations"},
    {"_config", "attention", "reference"},
    {"jaxgemv"},
    {"flax", "formats"},
    {"qwix"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    return (
        "jaxgemv"
        if path.name == "__init__.py" and len(path.parts) == 1
        else path.parts[0].removesuffix(".py")
    )


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in the file; not those for type checkers."""
    found = set()
    pending = [ast.parse((ROOT / path).read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for first, *rest in (name.split(".") for name in names):
            if first == "jaxgemv":
                found.add(rest[0] if rest and rest[0] in LEVEL else "jaxgemv")
        pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_direction(path):
    module = module_of(path)
    assert module in LEVEL, f"{path} has no place in the order of imports"
    for imported in imports_of(path) - {module}:
        assert LEVEL[imported] < LEVEL[module], f"{path} imports {imported}"


def test_private_names_of_jax():
    """None but the one that facts force on us; a new jax may move them any day."""
    lines = [line for path in FILES for line in (ROOT / path).read_text().splitlines() if "jax._src" in line]
    assert all("prim_requires_devices_during_lowering" in line for line in lines)


def test_import_needs_jax_and_numpy_alone(tmp_path):
    """A third party that only an extra installs must not be found out by users without it."""
    script = """
import sys
import jax, jax.export, numpy
blocked = "flax optax mlx gguf torch safetensors hypothesis pytest scipy.sparse matplotlib rich onnx".split()
before = {name.partition(".")[0] for name in sys.modules}
sys.modules |= dict.fromkeys(name for name in blocked if name not in sys.modules)
import jaxgemv, jaxgemv.formats
after = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
assert "jax.extend" not in sys.modules, "brings in Pallas, which takes longer than all of ours"
print(sorted(after - before - set(sys.stdlib_module_names)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['jaxgemv']"


def test_public_names():
    """What docs/api.md documents; anything else would be a promise made by accident."""
    public = {name for name in vars(jaxgemv) if not name.startswith("_")} - {
        "attention",
        "flax",
        "formats",
        "qwix",
    }
    functions = {f"gemv_int{bits}" for bits in range(1, 9)} | {
        "gemv",
        "quantize",
        "quantize_activations",
        "quantize_tree",
        "dequantize",
        "pack",
        "unpack",
    }
    assert public == functions | {"QuantizedTensor", "codebooks", "reference", "show_config", "EXPORT_CHECKS"}


def test_typed():
    assert (ROOT / "py.typed").exists()


def test_show_config(capsys):
    """All that a bug report needs, kernels or the reason why there are none."""
    jaxgemv.show_config()
    text = capsys.readouterr().out
    assert text.startswith(f"jaxgemv {jaxgemv.__version__}, jax ")
    for name, backend in jaxgemv._ffi.backends.items():
        assert f"{name}: {backend.missing}" in text if backend.missing else f"{name}:\n  " in text
