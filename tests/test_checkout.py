"""What runs in a checkout: the right package after a plain install or an editable one, and with none a line that says
what to do. In subprocesses, on a copy of the checkout; -S, so that no installation of this environment takes part."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import jaxgemv

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
pytestmark = pytest.mark.skipif(
    not (ROOT / "jaxgemv").is_dir(), reason="the sources are not beside the tests"
)

EDITABLE = any("_editable" in type(finder).__module__ for finder in sys.meta_path)
WHERE = "import jaxgemv; print(jaxgemv.__file__, jaxgemv._cpu.__file__, jaxgemv.__version__)"
TEST = ["-q", "tests/test_where.py"]
# In each way the Python files are those of the checkout.
WAYS = {
    "-c": ["-c", f"import jaxgemv._cpu; {WHERE}"],
    "-m jaxgemv": ["-m", "jaxgemv", "--help"],
    "-m bench": ["-m", "bench", "--help"],
    "-m bench.calls": ["-m", "bench.calls", "--help"],
    "-m pytest": ["-m", "pytest", *TEST],
    "pytest": ["-c", f"import sys, pytest; sys.path.remove(''); sys.exit(pytest.main({TEST}))"],
}


HELPERS = ("conftest", "kernels", "problems")  # what collecting tests imports


@pytest.fixture
def checkout(tmp_path):
    """A copy, with one test that says what it imports."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", ".cache", "results")
    for name in ("jaxgemv", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "csrc").mkdir()
    (folder / "tests").mkdir()
    for name in ("conftest.py", "pyproject.toml", *(f"tests/{helper}.py" for helper in HELPERS)):
        shutil.copy(ROOT / name, folder / name)
    test = f"def test(capsys):\n    import jaxgemv._cpu\n    {WHERE}\n    raise SystemExit(capsys.readouterr().out)\n"
    (folder / "tests/test_where.py").write_text(test)
    return folder


@pytest.fixture
def others(tmp_path):
    """All that is installed here but jaxgemv."""
    folder = tmp_path / "site"
    folder.mkdir()
    for site in dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")):
        for entry in Path(site).iterdir():
            if "jaxgemv" not in entry.name and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def install(folder: Path, version: str = VERSION) -> None:
    """What pip would leave behind."""
    shutil.copytree(
        ROOT / "jaxgemv", folder / "jaxgemv", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name in ("_cpu", "_cuda"):
        if spec := importlib.util.find_spec(f"jaxgemv.{name}"):
            shutil.copy(spec.origin, folder / "jaxgemv")
    info = folder / f"jaxgemv-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jaxgemv\nVersion: {version}\n")


def run(way: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if path is None else {"PYTHONPATH": str(path)})
    isolated = [] if path is None else ["-S"]
    return subprocess.run(
        [sys.executable, *isolated, *WAYS[way]], cwd=cwd, env=environment, capture_output=True, text=True
    )


def check(way: str, done: subprocess.CompletedProcess, python: Path, compiled: Path | None) -> None:
    text = done.stdout + done.stderr
    if "--help" in WAYS[way]:
        assert done.returncode == 0, text
        assert f"usage: python {way}" in text
    else:
        assert f"{python / 'jaxgemv/__init__.py'} " in text
        assert compiled is None or f" {compiled / 'jaxgemv/_cpu'}" in text
        assert f" {VERSION}" in text


@pytest.mark.parametrize("way", WAYS)
def test_plain_install(checkout, others, way):
    """Python from the checkout, extensions from the install."""
    install(others)
    check(way, run(way, checkout, others), checkout, others)


@pytest.mark.skipif(not EDITABLE, reason="this environment has no editable install")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "-m pytest"])
def test_editable_install(way, tmp_path):
    """Wherever the command runs; in the checkout itself, so without the test that tells."""
    for folder in (ROOT, tmp_path) if way == "-c" else (ROOT,):
        if way != "pytest":
            check(way, run(way, folder), ROOT, None)


@pytest.mark.parametrize("way", WAYS)
def test_no_install(checkout, others, way):
    """One line says what to do."""
    done = run(way, checkout, others)
    assert done.returncode != 0
    expected = (
        f"jaxgemv: this is the source tree, and its extensions are not built: run  pip install -e {checkout}"
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert expected in lines[-1]
    assert "Traceback" not in lines[0] or way in ("-c", "-m jaxgemv")


@pytest.mark.parametrize("way", ["-c", "-m bench"])
def test_install_of_another_version(checkout, others, way):
    """Its extensions may not fit these Python files."""
    install(others, "0.0.1")
    done = run(way, checkout, others)
    assert done.returncode != 0
    assert f"the source tree of version {VERSION}, and 0.0.1 is installed, and its" in done.stderr


def test_version():
    assert jaxgemv.__version__ == importlib.metadata.version("jaxgemv") == VERSION
