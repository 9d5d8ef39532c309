"""Everything that a number depends on: device, driver, versions, commit, command."""

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib

import jaxgemv
from bench import host_systems, native
from jaxgemv._ffi import backends, cpu_isa

_ROOT = Path(__file__).parent.parent
_PEERS = (
    "torch",
    "triton",
    "gemlite",
    "bitsandbytes",
    "mlx",
    "xllamacpp",
    "ik-llama-cpp-python",
    "llama-cpp-python",
)


def environment(device, commit: str | None, module: str = "bench") -> dict:
    """module: the one that runs."""
    env = {
        "device": device_name(device),
        "platform": device.platform,
        "os": platform.platform(),
        "python": platform.python_version(),
        "jaxgemv": jaxgemv.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit or os.environ.get("JAXGEMV_COMMIT") or _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(module, sys.argv[1:]),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if device.platform == "gpu":
        env["compute_capability"] = str(device.compute_capability)
        env["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        env["cuda"] = {
            d.metadata["Name"]: d.version
            for d in importlib.metadata.distributions()
            if re.match(
                r"jax.cuda\d+.plugin$|nvidia.cuda.(nvcc|runtime)|nvidia.cublas", d.metadata["Name"] or ""
            )
        }
        nvcc = re.search(r"release ([\d.]+)", _output(native.nvcc() or "nvcc", "--version") or "")
        env["nvcc"] = nvcc.group(1) if nvcc else None
    else:
        env["threads"] = host_systems.THREADS
        env["isa"] = None if backends["cpu"].missing else cpu_isa()
    env |= {name: version for name in _PEERS if (version := _version(name))}
    return env


def device_name(device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return model.group(1) if model else platform.processor() or platform.machine()


def _command(module: str, arguments: list[str]) -> str:
    """What was asked for, but not where files lie: that is one machine's affair."""
    words = ["python -m", module]
    left = iter(arguments)
    for word in left:
        if word == "--out":
            next(left)
        elif word in ("--ggml", "--gguf"):
            words += [word, Path(next(left)).name]
        elif not word.startswith("--out="):
            words.append(word)
    return " ".join(words)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
