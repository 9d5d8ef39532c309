"""Loads the compiled backends, guards the FFI version, registers their targets.

Each backend is an extension module (csrc/module.h) with `FFI_API_MINOR`, the version of XLA's FFI it was built for;
`registrations()`, target name to capsule; `operands()`, all names that its call knows; `kernels()`, its table; and
`row_limits()` and `weight_limits()`, the measured rows of x for which kernels are the faster way. One that knows
XLA's record stage says in `RECORDS` which versions of it, and has `recording()` for `registrations()`.
"""

import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib
from jaxlib.version import __version__ as jaxlib_version

from jaxgemv._operands import FACTS

# Products, and attention of one token. The version is part of a name: an exported program finds the handler it was made
# for, for ever.
TARGET, ATTEND = "jaxgemv_gemv_v1", "jaxgemv_attend_v1"

# Extension module and the name XLA registers its platform under ("cuda" in lower case is never found).
_MODULES = {"cpu": ("jaxgemv._cpu", "cpu"), "cuda": ("jaxgemv._cuda", "CUDA")}


class Kernel(NamedTuple):
    """One compiled kernel: `rows` rows of x share one read of the weights; `transposed` are for x @ w.

    operands: what it takes besides x, packed and scale, of the names in FACTS.
    """

    name: str
    format: str  # what a code stands for, of csrc/format.h: "affine", say
    bits: int
    x: str
    rows: int
    operands: frozenset[str]
    transposed: bool


class WeightLimits(NamedTuple):
    """Rows of x beside one weight, as csrc/row_limits.h has them."""

    loop_rows: int = 0  # up to which XLA's own loop is faster than any kernel
    rounded_rows: int = 0  # most_rows where the weight may be rounded to x's dtype
    epilogue_from: int = 1 << 62  # from which an activation and a residual are faster inside again


class Backend(NamedTuple):
    """A backend that loaded, or the reason why it did not."""

    kernels: tuple[Kernel, ...]
    missing: str | None = None
    # Rows of x, RowLimits of csrc/row_limits.h.
    most_rows: int = 0
    gradient_rows: int = 0
    fused_rows: int = 0
    epilogue_rows: int = 0
    residual_rows: int = 0
    global_scale_rows: int = 0
    # (rows, K, format, dtype of x, has norm) -> bytes of scratch for a row of x, in a second result of the call.
    image_bytes: Callable[[int, int, str, str, bool], int] = lambda *_: 0
    # (major compute capability, whether scales are of one byte, N, K, group, format, bits, dtype of x) -> WeightLimits.
    weight_limits: Callable[[int, bool, int, int, int, str, int, str], tuple[int, int, int]] = lambda *_: (
        WeightLimits()
    )
    # (codes of a matrix, dtype of x) -> whether a call without x, for the weights, is faster than XLA.
    dequantizes: Callable[[int, str], bool] = lambda *_: False
    # () -> of CUDA, those of the driver and of the build: 12040 is 12.4.
    versions: Callable[[], tuple[int, int]] = lambda: (0, 0)
    # Compute capability of a GPU, 80 for 8.0, to that of the code that runs there; 0 for none.
    code_for: Callable[[int], int] = lambda capability: capability

    def find(self, bits: int, x_dtype, transposed: bool = False, format: str = "affine") -> list[Kernel]:
        """The kernels for that, whatever else they take."""
        kind = format, bits, str(x_dtype), transposed
        return [k for k in self.kernels if (k.format, k.bits, k.x, k.transposed) == kind]


def _in_header(file: str, name: str) -> int | None:
    """A number that a header of the jaxlib that runs defines, if it does."""
    header = Path(jaxlib.__file__).parent / "include/xla/ffi/api" / file
    match = header.exists() and re.search(rf"#define {name} (\d+)", header.read_text())
    return int(match.group(1)) if match else None


def _runtime_ffi_minor() -> int:
    return _in_header("c_api.h", "XLA_FFI_API_MINOR") or 0


def _records(module) -> bool:
    """Whether XLA's record stage is one that the module knows, and not unwanted."""
    names = "XLA_FFI_Extension_Record_MajorVersion", "XLA_FFI_Extension_Record_MinorVersion"
    runtime = (_runtime_ffi_minor(), *(_in_header("record_c_api.h", name) for name in names))
    return os.environ.get("JAXGEMV_RECORD") != "0" and runtime in getattr(module, "RECORDS", [])


def _load(module_name: str, platform: str) -> Backend:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        built = importlib.util.find_spec(module_name) is not None
        return Backend((), f"cannot be loaded: {error}" if built else "not built")
    if reason := _unusable(module):
        warnings.warn(
            f"{module_name} is {reason}; its kernels are not used. Rebuild jaxgemv, or upgrade jaxlib.",
            RuntimeWarning,
            stacklevel=2,
        )
        return Backend((), reason)
    for name, capsule in (module.recording() if _records(module) else module.registrations()).items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return _backend(module)


def _unusable(module) -> str | None:
    # XLA would accept the registration and then fail the first operation of any kind.
    runtime = _runtime_ffi_minor()
    if module.FFI_API_MINOR > runtime:
        return f"built for XLA FFI 0.{module.FFI_API_MINOR}, but jaxlib {jaxlib_version} has 0.{runtime}"
    # A checkout may have moved on since it was installed.
    names = "operands", "row_limits", "weight_limits"
    if not all(hasattr(module, name) for name in names) or tuple(module.operands()) != FACTS:
        return "built from other sources than these Python files"
    return None


def _backend(module) -> Backend:
    kernels = tuple(
        Kernel(name, format, bits, x, rows, frozenset(operands), transposed)
        for name, format, bits, x, rows, operands, transposed in module.kernels()
    )
    names = "image_bytes", "weight_limits", "dequantizes", "versions", "code_for"
    functions = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return Backend(kernels, **module.row_limits(), **functions)


backends: dict[str, Backend] = {name: _load(*where) for name, where in _MODULES.items()}


def cpu_isas() -> tuple[str, ...]:
    """Instruction sets that the CPU backend supports on this processor, best first."""
    return () if backends["cpu"].missing else tuple(importlib.import_module("jaxgemv._cpu").isas())


def cpu_isa() -> str:
    """The instruction set that the CPU backend uses."""
    return importlib.import_module("jaxgemv._cpu").isa()


def cpu_has_bfloat16() -> bool:
    """Whether it multiplies bfloat16, which then is faster than float32."""
    return not backends["cpu"].missing and cpu_isa() in ("amx", "avx512bf16")


def set_cpu_isa(name: str) -> None:
    """Uses another instruction set than the best, for tests and benchmarks: C++ and this table alike.

    Programs that were compiled before keep the choice between kernel and reference that was made for them.
    """
    module = importlib.import_module("jaxgemv._cpu")
    module.set_isa(name)
    backends["cpu"] = _backend(module)


def last_kernel(platform: str) -> str:
    """Name of the kernel that ran last; "" before any has. A program that XLA has captured in a graph may not tell."""
    return importlib.import_module(_MODULES[platform][0]).last_kernel()


def use_only(platform: str, name: str) -> None:
    """Lets no kernel run but those of this name, or again all for "": for tests and benchmarks.

    A call that none of them can run fails, and so do programs that were compiled before.
    """
    importlib.import_module(_MODULES[platform][0]).use_only(name)
