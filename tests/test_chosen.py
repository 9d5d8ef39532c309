"""Which kernel is chosen where several could run a call, and how one alone is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import HOPPER, transposed
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv
from jaxgemv._ffi import backends, last_kernel, use_only

pytestmark = [pytest.mark.kernels, pytest.mark.numerics]

# Which kernel is chosen where all may run: the first of these names that the processor has, by measurements in
# docs/cuda-notes.md and docs/cpu-notes.md. Far from the crossovers, which may move.
CHOSEN = [
    ("cpu", 4, "float32", Case(1, 64, 1024, 128), "int8_dot f32_panel"),
    ("cpu", 8, "bfloat16", Case(1, 64, 1024, 128, "zero"), "int8_dot f32_panel"),
    ("cpu", 4, "float32", Case(1, 64, 1000, 5), "f32_panel"),
    ("cpu", 3, "float16", Case(1, 64, 1024, 128), "int8_dot f32_panel"),
    ("cpu", 4, "float32", Case(8, 1024, 1024, 128), "amx_int8 f32_panel"),
    ("cpu", 4, "float32", Case(8, 64, 1024, 128), "f32_panel"),
    ("cpu", 4, "float32", Case(8, 1024, 1024, 32), "f32_panel"),
    ("cpu", 4, "float32", Case(512, 1024, 1024, 128), "f32_panel"),
    ("cpu", 4, "bfloat16", Case(64, 64, 1024, 128), "amx_bf16 bf16_panel f32_panel"),
    ("cpu", 3, "bfloat16", Case(64, 64, 1024, 128), "amx_panel bf16_panel f32_panel"),
    ("cpu", 4, "bfloat16", Case(2000, 64, 128, 64), "amx_panel bf16_panel f32_panel"),
    ("cpu", 4, "bfloat16", Case(64, 64, 1024, 16), "amx_panel f32_panel"),  # two groups in a chunk of codes
    ("cpu", 4, "bfloat16", Case(65, 64, 1024, 16), "amx_panel bf16_weights f32_panel"),
    ("cpu", 4, "float16", Case(64, 64, 1024, 16), "f32_panel"),
    ("cuda", 4, "bfloat16", Case(1, 4096, 1024, 128, "zero"), "stream"),
    ("cuda", 2, "float16", Case(1, 4096, 1024, 64), "stream"),
    ("cuda", 8, "bfloat16", Case(8, 4096, 1024, "row", scale="float32"), "stream"),
    ("cuda", 4, "float16", Case(8, 4096, 1024, 32), "stream"),
    ("cuda", 4, "float16", Case(8, 256, 8192, 128), "direct"),
    ("cuda", 2, "bfloat16", Case(64, 4096, 1024, 128), "stream"),
    ("cuda", 2, "float16", Case(64, 16384, 2048, 128), "wgmma_any stream"),
    ("cuda", 4, "bfloat16", Case(16, 4096, 14336, 128), "wgmma_tma stream"),
    ("cuda", 4, "bfloat16", Case(32, 4096, 14336, 128), "wgmma_tma mma_any"),
    ("cuda", 4, "bfloat16", Case(33, 5120, 2048, 128), "wgmma mma_any"),
    ("cuda", 4, "bfloat16", Case(33, 8192, 2048, 128), "wgmma_tma mma_any"),
    ("cuda", 7, "float32", Case(64, 3328, 512, "row"), "wgmma_tma mma_any"),
    ("cuda", 8, "float16", Case(64, 6148, 1024, "row"), "wgmma direct"),
    ("cuda", 4, "bfloat16", Case(16, 28672, 4096, 128), "wgmma_tma stream"),
    ("cuda", 8, "float32", Case(20, 8192, 4096, 128), "wgmma_tma mma_any"),
    ("cuda", 4, "bfloat16", Case(64, 400, 40960, 32), "wgmma_tma mma_any"),
    ("cuda", 5, "float32", Case(9, 8192, 1024, 128), "wgmma_tma mma_any"),
    ("cuda", 8, "bfloat16", Case(16, 7168, 2304, 128), "wgmma_tma stream"),
    ("cuda", 8, "bfloat16", Case(16, 8192, 2048, 128), "stream"),
    ("cuda", 4, "float16", Case(4, 16384, 4096, 128, scale="float32"), "stream"),
    ("cuda", 4, "float32", Case(1, 16384, 4096, 128), "stream"),
    ("cuda", 4, "float16", Case(4, 16384, 4096, 384), "direct"),
    ("cuda", 8, "bfloat16", Case(100, 256, 1024, 128), "direct"),
    ("cuda", 8, "bfloat16", Case(300, 256, 1024, 128), "mma_any"),
    ("cuda", 4, "float32", Case(100, 512, 512, 128), "mma_any"),
    ("cuda", 4, "bfloat16", Case(65, 7700, 2048, 32), "gemm_tma mma_any"),
    ("cuda", 4, "bfloat16", Case(65, 7700, 2056, 128), "gemm mma_any"),
    ("cuda", 4, "bfloat16", Case(400, 33000, 256, 64), "gemm_tma mma_any"),
    ("cuda", 8, "bfloat16", Case(2, 16640, 1024, 512), "stream"),
    ("cuda", 8, "bfloat16", Case(2, 16640, 1024, 384), "direct"),
    ("cuda", 4, "float32", Case(3, 16384, 2048, 128), "wgmma_tma mma_any"),
    ("cuda", 3, "bfloat16", Case(3, 16384, 2048, 32), "mma_any"),
    ("cuda", 3, "bfloat16", Case(4, 16384, 2048, 32), "wgmma_tma mma_any"),
    ("cuda", 6, "bfloat16", Case(8, 8192, 4096, 128), "wgmma_tma direct"),
    ("cuda", 4, "bfloat16", Case(3, 999, 4099, "row"), "mma_any"),
    ("cuda", 3, "bfloat16", Case(2, 8192, 4096, 32), "stream"),
    ("cuda", 3, "bfloat16", Case(2, 8192, 4000, 32), "stream"),
    ("cuda", 4, "bfloat16", Case(2, 999, 4099, "row"), "stream"),
    ("cuda", 6, "float32", Case(1, 8192, 1024, 64), "stream"),
    ("cuda", 6, "float32", Case(1, 8192, 1056, 32), "stream"),
    ("cuda", 6, "float32", Case(2, 16384, 2048, 64), "wgmma_tma mma_any"),
    ("cuda", 5, "bfloat16", Case(1, 1536, 1024, 128), "fma"),
    ("cuda", 1, "float16", Case(1, 4096, 1024, "row", scale="float32"), "stream"),
    ("cuda", 4, "float32", Case(1, 1024, 4096, 128), "stream"),
    ("cuda", 4, "float32", Case(1, 1024, 4096, 96), "fma"),
    ("cuda", 4, "bfloat16", Case(1, 256, 1024, 128, "zero"), "fma"),
    ("cuda", 6, "float16", Case(17, 256, 1024, 16), "wgmma_any mma_any"),
    ("cuda", 4, "bfloat16", Case(2, 256, 1024, 128, "zero"), "direct"),
    ("cuda", 8, "float16", Case(64, 512, 512, "row"), "direct"),
    ("cuda", 5, "float32", Case(8, 2048, 1024, 64), "direct"),
    ("cuda", 7, "float32", Case(8, 5760, 2880, 64, scale="float32"), "direct"),
    ("cuda", 6, "bfloat16", Case(1, 8192, 1024, 256), "stream"),
    ("cuda", 6, "bfloat16", Case(1, 8192, 1056, "row"), "stream"),
    ("cuda", 4, "bfloat16", Case(1, 256, 1000, 8), "simt"),
    ("cuda", 4, "bfloat16", Case(300, 1536, 2304, 128), "gemm_tma mma_any"),
]
CHOSEN_TRANSPOSED = [
    ("cpu", 4, "float32", Case(1, 64, 1024, 128), "transposed"),
    ("cuda", 4, "bfloat16", Case(1, 256, 1024, 128), "transposed"),
    ("cuda", 2, "float16", Case(16, 256, 1024, 64), "transposed"),
    ("cuda", 8, "float32", Case(33, 256, 1024, "row"), "transposed"),
    ("cuda", 4, "bfloat16", Case(1, 256, 1024, 16), "transposed_simt"),
    ("cuda", 3, "float32", Case(1, 256, 1024, 128), "transposed_simt"),
]


CHOSEN_PARTS = [
    ("cuda", 4, "bfloat16", Case(1, 1536, 1024, 128), "direct"),
    ("cuda", 4, "float16", Case(2, 1536, 1024, 128), "direct"),
    ("cuda", 4, "float16", Case(1, 8192, 1024, 128), "stream"),
    ("cuda", 8, "bfloat16", Case(4, 2048, 4096, 128), "stream"),
    ("cuda", 5, "bfloat16", Case(4, 4096, 1024, 128), "direct"),
    ("cuda", 5, "bfloat16", Case(1, 4096, 4096, 64), "stream"),
    ("cuda", 7, "float32", Case(1, 8192, 4096, "row", scale="float32"), "stream"),
    ("cuda", 5, "bfloat16", Case(4, 8192, 4096, 128), "mma_any"),
    ("cuda", 4, "bfloat16", Case(6, 8192, 4096, 128), "wgmma_tma stream"),
    ("cuda", 4, "bfloat16", Case(4, 8192, 2048, 128), "direct"),
]
CHOSEN_FORMATS = [
    ("cpu", ("codebook", 4), "float32", Case(1, 64, 1024, 64), "f32_dot f32_panel"),
    (
        "cpu",
        ("codebook", 4),
        "bfloat16",
        Case(80, 64, 1024, 64, scale="float32"),
        "amx_panel bf16_weights f32_panel",
    ),
    ("cuda", ("codebook", 4), "bfloat16", Case(1, 4096, 1024, 64, scale="float32"), "stream"),
    ("cuda", ("codebook", 4), "float16", Case(8, 4096, 1024, 16, scale="float8_e4m3fn"), "stream"),
    ("cuda", ("codebook", 4), "bfloat16", Case(40, 8192, 1024, 32), "wgmma_tma direct"),
    ("cuda", ("codebook", 4), "float32", Case(4, 16384, 1024, 16, scale="float8_e4m3fn"), "wgmma_tma direct"),
    (
        "cuda",
        ("codebook", 4),
        "bfloat16",
        Case(6, 6144, 2880, 32, scale="float8_e8m0fnu"),
        "wgmma_tma direct",
    ),
    ("cuda", ("codebook", 4), "float16", Case(4, 2304, 11008, 32), "wgmma_tma stream"),
    ("cuda", ("codebook", 4), "bfloat16", Case(12, 1024, 8192, 64, scale="float32"), "wgmma_tma direct"),
    ("cuda", ("codebook", 4), "float16", Case(16, 4096, 1024, 32, scale="float8_e8m0fnu"), "stream"),
    (
        "cuda",
        ("codebook", 4),
        "bfloat16",
        Case(16, 1536, 8192, 32, scale="float8_e8m0fnu"),
        "wgmma_tma stream",
    ),
    ("cuda", ("codebook", 4), "bfloat16", Case(20, 4864, 896, 16, scale="float8_e4m3fn"), "wgmma_tma direct"),
    (
        "cuda",
        ("codebook", 4),
        "float32",
        Case(16, 384, 13824, 16, scale="float8_e4m3fn"),
        "wgmma_tma mma_any",
    ),
    ("cuda", ("codebook", 4), "float16", Case(64, 512, 8192, 16, scale="float8_e4m3fn"), "wgmma_tma direct"),
    (
        "cuda",
        ("codebook", 4),
        "float16",
        Case(9, 27648, 1536, 32, scale="float8_e8m0fnu"),
        "wgmma_tma stream",
    ),
    ("cuda", ("codebook", 4), "float32", Case(2, 2304, 1280, 16, scale="float8_e4m3fn"), "wgmma_tma direct"),
    ("cuda", ("codebook", 4), "float16", Case(4, 1024, 22016, 64), "wgmma_tma direct"),
    ("cuda", ("codebook", 4), "bfloat16", Case(16, 4096, 2048, 64, scale="float32"), "stream"),
    ("cuda", ("codebook", 4), "bfloat16", Case(12, 2880, 576, 64, scale="float32"), "direct"),
    ("cuda", ("codebook", 4), "float32", Case(1, 4096, 1024, 64), "direct"),
    ("cuda", ("codebook", 4), "float32", Case(1, 16384, 2048, 64), "wgmma_tma mma_any"),
    ("cuda", ("codebook", 4), "float32", Case(1, 1024, 8192, 64), "wgmma_tma mma_any"),
    ("cuda", ("codebook", 4), "float32", Case(1, 8192, 2048, 32, scale="float8_e8m0fnu"), "stream"),
    ("cuda", ("codebook", 4), "float32", Case(2, 8192, 1024, 32, scale="float8_e8m0fnu"), "wgmma_tma stream"),
    ("cuda", ("codebook", 4), "float32", Case(1, 32000, 384, 64), "wgmma_tma direct"),
    ("cuda", ("codebook", 4), "bfloat16", Case(1, 32000, 192, 64), "stream"),
    ("cuda", ("codebook", 4), "float16", Case(8, 65536, 256, 32, scale="float32"), "stream"),
    ("cuda", ("codebook", 4), "bfloat16", Case(2, 20480, 128, 64), "direct"),
    ("cuda", ("float8_e4m3fn", 8), "float32", Case(1, 6144, 2048, 32), "stream"),
    ("cuda", ("float8_e4m3fn", 8), "float32", Case(1, 8192, 512, "row"), "direct"),
    ("cuda", ("codebook", 4), "bfloat16", Case(16, 768, 4096, 64, scale="float32"), "direct"),
    ("cuda", ("codebook", 4), "bfloat16", Case(1, 256, 1024, 64, scale="float32"), "direct"),
    ("cuda", ("codebook", 4), "float32", Case(32, 512, 512, 16, scale="float8_e4m3fn"), "direct"),
    ("cuda", ("codebook", 4), "bfloat16", Case(65, 7696, 2048, 32), "gemm_tma mma_any"),
    ("cuda", ("codebook", 4), "float16", Case(65, 7696, 2048, 16, scale="float8_e4m3fn"), "gemm_tma mma_any"),
    (
        "cuda",
        ("codebook", 4),
        "float32",
        Case(300, 3000, 1024, 16, scale="float8_e4m3fn"),
        "gemm_tma mma_any",
    ),
    ("cuda", ("float8_e4m3fn", 8), "bfloat16", Case(100, 7696, 2048, 128), "gemm_tma mma_any"),
    ("cuda", ("codebook", 3), "float16", Case(1, 256, 1024, 64), "simt"),
    ("cuda", ("float8_e4m3fn", 8), "float16", Case(64, 512, 512, 32, scale="float8_e8m0fnu"), "direct"),
    ("cuda", ("float8_e4m3fn", 8), "bfloat16", Case(16, 4096, 1024, "row", scale="float32"), "stream"),
    ("cuda", ("float8_e5m2", 8), "float32", Case(16, 4096, 2048, "row"), "wgmma_tma mma_any"),
]


def chosen(rows):
    return pytest.mark.parametrize(
        ("backend", "bits", "x", "case", "names"),
        [pytest.param(*row, marks=[pytest.mark.cuda] * (row[0] == "cuda")) for row in rows],
        indirect=["backend"],
        ids=lambda value: str(value).replace(" ", "-or-"),
    )


def expected(backend: str, bits: int, x: str, names: str, transposed: bool = False, format="affine") -> str:
    there = {k.name for k in backends[backend].find(bits, x, transposed, format)}
    if backend == "cuda" and not jnp.zeros(()).device.compute_capability.startswith("9."):
        there -= HOPPER
    return next(name for name in names.split() if name in there)


@chosen(CHOSEN)
def test_chosen(backend, bits, x, case, names, rng):
    p = make(rng, bits, x, case)
    jax.block_until_ready(gemv(p.x, p.tensor, implementation=backend))
    assert last_kernel(backend) == expected(backend, bits, x, names)


@chosen(CHOSEN_PARTS)
def test_parts_chosen(backend, bits, x, case, names, rng):
    """With a norm, and of odd rows a residual."""
    p = make(rng, bits, x, case)
    residual = jnp.ones((case.m, case.n), p.x.dtype) if case.m % 2 else None
    norm = jnp.ones(case.k, p.x.dtype)
    jax.block_until_ready(gemv(p.x, p.tensor, norm=norm, residual=residual, implementation=backend))
    assert last_kernel(backend) == expected(backend, bits, x, names)


@chosen(CHOSEN_FORMATS)
def test_format_chosen(backend, bits, x, case, names, rng):
    format, bits = bits
    p = make(rng, bits, x, case, format=format)
    jax.block_until_ready(gemv(p.x, p.tensor, implementation=backend))
    assert last_kernel(backend) == expected(backend, bits, x, names, format=format)


@chosen(CHOSEN_TRANSPOSED)
def test_transposed_chosen(backend, bits, x, case, names, rng):
    p = make(rng, bits, x, case)
    ct = np.zeros((case.m, case.n), p.x.dtype)
    jax.block_until_ready(transposed(ct, p.tensor, case.k, backend))
    assert last_kernel(backend) == expected(backend, bits, x, names, transposed=True)


def test_use_only():
    """A call that no kernel of the name can run fails, and all of them may run again after it."""
    w = QuantizedTensor(packed=jnp.zeros((3, 4), jnp.uint32), scale=jnp.float32(1), bits=4)
    call = lambda: jax.block_until_ready(gemv(jnp.ones(32), w, implementation="cpu"))  # noqa: E731
    with jax.default_device(jax.devices("cpu")[0]):
        use_only("cpu", "transposed")
        try:
            with pytest.raises(
                (jax.errors.JaxRuntimeError, NotImplementedError), match="no cpu kernel that may run"
            ):
                call()
        finally:
            use_only("cpu", "")
        call()
    with pytest.raises(ValueError, match="no kernel is called fastest"):
        use_only("cpu", "fastest")
