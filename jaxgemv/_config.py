"""What is installed and what loaded."""

import importlib.metadata
import platform
from collections import defaultdict

import jax
import jax.export
import numpy as np

from jaxgemv._ffi import TARGET, backends, jaxlib_version

__version__ = importlib.metadata.version("jaxgemv")

# What to pass as `disabled_checks` to jax.export.export: our custom call keeps its meaning for ever.
EXPORT_CHECKS = (jax.export.DisabledSafetyCheck.custom_call(TARGET),)


def show_config() -> None:
    """Prints versions, devices, and the kernels of each backend or why it has none; put it in bug reports."""
    print(f"jaxgemv {__version__}, jax {jax.__version__}, jaxlib {jaxlib_version}, numpy {np.__version__}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(f"devices: {', '.join(str(d) for d in jax.devices())}")
    for name, backend in backends.items():
        if backend.missing:
            print(f"{name}: {backend.missing}")
            continue
        dtypes = defaultdict(list)
        for kernel in backend.kernels:
            transposed = ", transposed" * kernel.transposed
            dtypes[kernel.x].append(f"{kernel.name} (int{kernel.bits}{transposed})")
        print(f"{name}:")
        for dtype, names in dtypes.items():
            print(f"  x {dtype}: {', '.join(sorted(set(names)))}")
