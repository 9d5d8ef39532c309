"""What is installed and what loaded."""

import importlib.metadata
import platform
from collections import defaultdict

import jax
import jax.export
import numpy as np

from jaxgemv import _dispatch
from jaxgemv._ffi import ATTEND, TARGET, Backend, backends, jaxlib_version

#: The version of this package, as pip knows it.
__version__ = importlib.metadata.version("jaxgemv")

#: What to pass as `disabled_checks` to `jax.export.export`: our custom calls keep their meaning for ever.
EXPORT_CHECKS = tuple(jax.export.DisabledSafetyCheck.custom_call(target) for target in (TARGET, ATTEND))


def show_config() -> None:
    """Prints versions, devices, and the kernels of each backend or why it has none; put it in bug reports.

    >>> import jaxgemv
    >>> jaxgemv.show_config()
    jaxgemv ..., jax ..., jaxlib ..., numpy ...
    """
    print(f"jaxgemv {__version__}, jax {jax.__version__}, jaxlib {jaxlib_version}, numpy {np.__version__}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(f"devices: {', '.join(str(d) for d in jax.devices())}")
    for name, backend in backends.items():
        if backend.missing:
            print(f"{name}: {backend.missing}")
            continue
        if name == "cuda" and (reason := _dispatch.unfit_gpu()):
            print(f"{name}: not in use, since {reason}")
            continue
        print(f"{name}:")
        if name == "cuda" and all(d.platform != "gpu" for d in jax.devices()):
            print("  not in use, since JAX sees no GPU")
        for dtype in dict.fromkeys(kernel.x for kernel in backend.kernels):
            products, gradients = (kernels_text(backend, dtype, kind) for kind in (False, True))
            print(f"  x {dtype}: {products}; gradients: {gradients}")


def kernels_text(backend: Backend, x: str, transposed: bool) -> str:
    """The kernels for x of that dtype with their weights, "stream: int2, int4; simt: int1 to int8"."""
    widths = defaultdict(lambda: defaultdict(list))
    for kernel in backend.kernels:
        if (kernel.x, kernel.transposed) == (x, transposed):
            widths[kernel.name][kernel.format].append(kernel.bits)
    return "; ".join(
        f"{name}: {', '.join(weights_text(format, sorted(bits)) for format, bits in formats.items())}"
        for name, formats in widths.items()
    )


def weights_text(format: str, bits: list[int]) -> str:
    if format not in ("affine", "codebook"):
        return format
    kind = "int" if format == "affine" else "codebook"
    whole = bits == list(range(bits[0], bits[-1] + 1)) and len(bits) > 2
    return f"{kind}{bits[0]} to {kind}{bits[-1]}" if whole else ", ".join(f"{kind}{each}" for each in bits)
