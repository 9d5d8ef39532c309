"""Where is nvcc? Run as a script, prints its path, or nothing."""

import importlib.util
import os
import shutil
from pathlib import Path


def find_nvcc() -> str | None:
    """$CUDACXX, $CUDA_HOME, PATH, the usual place, and last the compiler that comes as wheels."""
    if compiler := os.environ.get("CUDACXX"):
        return shutil.which(compiler)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for folder in (home and f"{home}/bin", None, "/usr/local/cuda/bin"):
        if nvcc := shutil.which("nvcc", path=folder):
            return nvcc
    return _nvcc_from_wheels()


def _nvcc_from_wheels() -> str | None:
    # jax[cuda13] brings some of these wheels, too few to compile with: take all or nothing.
    needed = (
        "bin/nvcc",
        "nvvm/bin/cicc",
        "lib/libcudart_static.a",
        "include/cuda_runtime.h",
        "include/crt/host_config.h",
        "include/nv/target",
    )
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        root = Path(folder, "cu13")
        if all((root / each).exists() for each in needed):
            return str(root / "bin/nvcc")
    return None


if __name__ == "__main__":
    print(find_nvcc() or "")
