"""Kernel or reference, and why: the one place that asks the tables of kernels."""

import warnings
from functools import cache
from math import prod

import jax
import numpy as np

from jaxgemv import _around
from jaxgemv._check import FLOAT8, FLOATS, ONE_BYTE
from jaxgemv._ffi import Kernel, WeightLimits, backends
from jaxgemv._operands import FACTS, Operands, Static
from jaxgemv._shapes import known

_REQUIRED = {"x", "packed", "scale"}
_IN_LOOPS = {"zero", "offset", "codebook", "global_scale", "one_byte_scale"}


def facts(o: Operands, s: Static) -> set[str]:
    """All that is given and that not every kernel takes, by the names of their table."""
    found = o.items().keys() - _REQUIRED
    if s.activation is not None:
        found |= {"activation"}
    if o.scale is not None and o.scale.dtype in ONE_BYTE:
        found |= {"one_byte_scale"}
    return found


def kernels_for(platform: str, o: Operands, s: Static) -> list[Kernel]:
    """The kernels that take all that is given."""
    given = facts(o, s)
    return [k for k in _find(platform, o, s) if given <= k.operands]


def _find(platform: str, o: Operands, s: Static) -> list[Kernel]:
    return backends[platform].find(s.bits, o.x.dtype, s.k is not None, format_of(o))


def format_of(o: Operands) -> str:
    """What a code stands for, by the names of csrc/format.h."""
    if o.packed.dtype in FLOAT8:
        return str(o.packed.dtype)
    return "affine" if o.codebook is None else "codebook"


def fuses(platform: str, o: Operands, s: Static) -> bool:
    """Whether kernels take all of it, and a call with these parts inside is faster than with XLA's around it."""
    inside = o.known_rows is None or _are_inside(platform, o, s)
    return inside and bool(kernels_for(platform, o, s))


def _are_inside(platform: str, o: Operands, s: Static) -> bool:
    backend = backends[platform]
    if o.norm is not None and (not s.round_norm or o.rows > backend.fused_rows):
        return o.rows <= backend.fused_rows
    if o.global_scale is not None:
        scales = _around.only_scales(o, s)
        return o.rows <= (_most_rows(platform, o, s) if scales else backend.global_scale_rows)
    if o.rows <= (backend.epilogue_rows if o.norm is not None or s.activation else backend.residual_rows):
        return True
    return _limits(platform, o, s).epilogue_from <= o.rows <= backend.most_rows


def why_no_kernel(platform: str, o: Operands, s: Static) -> str | None:
    """Why the platform's compiled kernels cannot run these operands; None when they can."""
    backend = backends[platform]
    if backend.missing:
        return f"the {platform} backend is {backend.missing}"
    if platform == "cuda" and (reason := unfit_gpu()):
        return reason
    if kernels_for(platform, o, s):
        return None
    if _around.has_parts(o, s):  # which are composed around a kernel
        o, s = _around.inner_call(o, s)
        return why_no_kernel(platform, o, s)
    if floats := float_x(o):
        return why_no_kernel(platform, o._replace(x=jax.ShapeDtypeStruct(o.x.shape, floats)), s)
    kind = "kernel" if s.k is None else "kernel for gradients"
    found = _find(platform, o, s)
    if found:
        lacking = facts(o, s) - frozenset().union(*(k.operands for k in found))
        names = ", ".join(name for name in FACTS if name in lacking) or "these operands together"
        return f"the {platform} backend has no {kind} that takes {names}"
    link = "for" if s.k is None else "with"
    scale = " without scale" if o.scale is None else ""
    return f"the {platform} backend has no {kind} {link} bits = {s.bits} and x of dtype {o.x.dtype}{scale}"


def float_x(o: Operands) -> np.dtype | None:
    """For int8 x and a weight with scales, a float dtype that holds x and has kernels: of 16 bits, or of 32 where there
    may be so many rows that weights would be rounded to 16."""
    if o.x.dtype != np.int8 or o.scale is None:
        return None
    return np.dtype(np.float32 if o.maybe_many else np.float16)


def why_reference(platform: str | None, obstacle: str | None, o: Operands, s: Static) -> str | None:
    """Why a program that is lowered for `platform` (None: one without kernels) runs the reference; None if it does not.

    Raises NotImplementedError for a named implementation that this leaves out.
    """
    if obstacle:
        reason = obstacle
    elif platform is None:
        reason = "this platform has no compiled kernels"
    elif s.implementation not in (None, platform):
        reason = f"the program is lowered for {platform}"
    else:
        reason = why_no_kernel(platform, o, s)
    if s.implementation in backends and reason:
        raise NotImplementedError(f"{s.op}: implementation={s.implementation!r} cannot run: {reason}")
    if platform == "cuda" and s.implementation is None:
        _warn_of_slow_gpu()
    if reason or platform is None or s.implementation is not None:
        return reason
    rows = o.known_rows
    if rows is not None and rows > (most := _most_rows(platform, o, s)):
        return f"{rows} rows of x are more than {most}"
    if loops(platform, o, s):
        return "the weight is so small that XLA's own loop is faster"
    return None


def _most_rows(platform: str, o: Operands, s: Static) -> int:
    backend = backends[platform]
    if s.k is not None:
        return backend.gradient_rows
    if not rounds(platform, o, s):
        return backend.most_rows
    return max(backend.most_rows, _limits(platform, o, s).rounded_rows)


def _limits(platform: str, o: Operands, s: Static) -> WeightLimits:
    n, k = _sides(o, s)
    x = str(s.dtype_before_norm or o.x.dtype)
    major, one_byte = _capability() if platform == "cuda" else 0, "one_byte_scale" in facts(o, s)
    limits = backends[platform].weight_limits
    return WeightLimits(*limits(major, one_byte, n, k, s.group or k, format_of(o), s.bits, x))


def _sides(o: Operands, s: Static) -> tuple[int, int]:
    """(N, K), of a large matrix where they are not known."""
    n, k = known(o.packed.shape[-2]), known(s.k or o.x.shape[-1])
    return 1 << 14 if n is None else n, 1 << 14 if k is None else k


def loops(platform: str | None, o: Operands, s: Static) -> bool:
    """Whether XLA's own loop is faster than a kernel: for so few weights and rows that how a kernel begins counts most.

    Parts around it would be more kernels of XLA's, and of a stack it would copy an entry.
    """
    if platform is None or s.implementation is not None or s.k is not None or o.x.dtype not in FLOATS:
        return False
    if o.scale is None or not facts(o, s) <= _IN_LOOPS:
        return False
    rows = o.known_rows
    return rows is not None and rows <= _limits(platform, o, s).loop_rows


# Values of jax.default_matmul_precision with which a GPU multiplies float32 x in TF32.
_TF32 = None, "default", "fastest", "tensorfloat32", "TF32_TF32_F32"


def rounds(platform: str, o: Operands, s: Static) -> bool:
    """Whether a kernel may round each weight to x's dtype, as the matmul in its place would, if rows are many."""
    x = s.dtype_before_norm or o.x.dtype
    # A norm may have made float32 of x. A program for any number of rows cannot decide later whether to round it again,
    # so the number must be known.
    many = o.many if s.dtype_before_norm is not None else o.maybe_many
    if not many or s.k is not None or x not in FLOATS:
        return False
    return x != np.float32 or (platform == "cuda" and s.precision in _TF32)


def dequantizes(platform: str | None, o: Operands, s: Static) -> bool:
    """Whether a kernel writes out the weight, for more rows than kernels of products are for."""
    if platform is None or s.implementation is not None or (platform == "cuda" and unfit_gpu()):
        return False
    return backends[platform].dequantizes(prod(_sides(o, s)), str(s.dtype_before_norm or o.x.dtype))


def _capability() -> int:
    """The major compute capability of the code that runs on the GPUs here; 0 where they differ or there is none."""
    found = {backends["cuda"].code_for(_number(d)) // 10 for d in _gpus()}
    return found.pop() if len(found) == 1 else 0


def _number(gpu) -> int:
    """Its compute capability, 80 for 8.0."""
    major, minor = gpu.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def shared_rows(platform: str, o: Operands, s: Static) -> int:
    """The most rows of x that share one read of the weights, as far as kernels are the faster way."""
    shared = max((k.rows for k in kernels_for(platform, o, s)), default=0)
    return min(shared, backends[platform].most_rows)


def scratch(platform: str, o: Operands, s: Static) -> jax.ShapeDtypeStruct | None:
    """The buffer that a kernel needs besides its result, for an image of x (B, M, K); None if it needs none."""
    if s.k is not None:
        return None
    rows = 1 << 20 if o.known_rows is None else o.known_rows
    exact_norm = o.norm is not None and not s.round_norm
    nbytes = backends[platform].image_bytes(rows, o.x.shape[2], format_of(o), str(o.x.dtype), exact_norm)
    return jax.ShapeDtypeStruct((*o.x.shape[:2], nbytes), np.uint8) if nbytes else None


def _gpus() -> list:
    """The GPUs of this process."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def _has_gpu() -> bool:
    return bool(_gpus())


_OLDEST = 8.0  # compute capability that kernels are compiled for


@cache
def unfit_gpu() -> str | None:
    """Why GPUs of this process cannot run what was compiled; None without any, as when lowering for GPUs elsewhere."""
    driver, built = backends["cuda"].versions()
    if not driver:
        return None
    gpus = _gpus()
    if gpus and driver // 1000 < built // 1000:
        return f"jaxgemv._cuda is built with CUDA {_text(built)}, and the driver is for {_text(driver)}"
    oldest = min((float(d.compute_capability) for d in gpus), default=_OLDEST)
    if oldest < _OLDEST:
        return f"a GPU has compute capability {oldest}, and kernels need {_OLDEST}"
    for gpu in gpus:
        if not backends["cuda"].code_for(_number(gpu)):
            return f"jaxgemv._cuda is not compiled for a GPU of compute capability {gpu.compute_capability}"
    return None


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _warn_of_slow_gpu() -> None:
    """Warns, once for each reason, where a GPU is here and runs no kernels."""
    if backends["cuda"].missing and _has_gpu():
        _warn(f"jaxgemv._cuda is {backends['cuda'].missing}", "Reinstall with JAXGEMV_CUDA=ON; ")
    elif reason := unfit_gpu():
        _warn(reason)


@cache
def _warn(reason: str, remedy: str = "") -> None:
    warnings.warn(
        f"{reason}: on this GPU products dequantise their weights first, which is many times slower."
        f" {remedy}jaxgemv.show_config() says more.",
        RuntimeWarning,
        stacklevel=2,
    )
