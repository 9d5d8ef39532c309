"""Loads the compiled backends, guards the FFI version, registers their targets.

Each backend is an extension module with three things: `FFI_API_MINOR`, the version of XLA's FFI it was
built for; `registrations()`, target name to capsule; and `kernels()`, its table of compiled kernels.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib

# The version is part of the name: an exported program finds the handler it was made for, for ever.
TARGET = "jaxgemv_gemv_v1"
TRANSPOSED_TARGET = "jaxgemv_gemv_transposed_v1"

jaxlib_version = importlib.metadata.version("jaxlib")

# Extension module and the name XLA registers its platform under ("cuda" in lower case is never found).
_MODULES = {"cpu": ("jaxgemv._cpu", "cpu"), "cuda": ("jaxgemv._cuda", "CUDA")}


class Kernel(NamedTuple):
    """One compiled kernel: `rows` rows of x share one read of the weights; `transposed` are for x @ w."""

    name: str
    bits: int
    x: str
    rows: int
    transposed: bool


class Backend(NamedTuple):
    """A backend that loaded, or the reason why it did not."""

    kernels: tuple[Kernel, ...]
    missing: str | None = None

    def supports(self, bits: int, x_dtype, transposed: bool = False) -> bool:
        return self.rows_of(bits, x_dtype, transposed) > 0

    def rows_of(self, bits: int, x_dtype, transposed: bool = False) -> int:
        """The most rows of x that share one read of the weights."""
        kind = bits, str(x_dtype), transposed
        return max((k.rows for k in self.kernels if (k.bits, k.x, k.transposed) == kind), default=0)


def _runtime_ffi_minor() -> int:
    """The FFI version of the jaxlib that runs, from the header it ships."""
    header = Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    match = re.search(r"#define XLA_FFI_API_MINOR (\d+)", header.read_text())
    return int(match.group(1)) if match else 0


def _load(module_name: str, platform: str) -> Backend:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        built = importlib.util.find_spec(module_name) is not None
        return Backend((), f"cannot be loaded: {error}" if built else "not built")
    # XLA would accept the registration and then fail the first operation of any kind.
    runtime = _runtime_ffi_minor()
    if module.FFI_API_MINOR > runtime:
        reason = f"built for XLA FFI 0.{module.FFI_API_MINOR}, but jaxlib {jaxlib_version} has 0.{runtime}"
        warnings.warn(
            f"{module_name} is {reason}; its kernels are not used. Rebuild jaxgemv, or upgrade jaxlib.",
            RuntimeWarning,
            stacklevel=2,
        )
        return Backend((), reason)
    for name, capsule in module.registrations().items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return Backend(tuple(Kernel(*row) for row in module.kernels()))


backends: dict[str, Backend] = {name: _load(*where) for name, where in _MODULES.items()}
