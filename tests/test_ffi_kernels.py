"""Hand-made calls of each kernel by its name: operands that none takes, and room for x's image."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import must_take
from kernels import assert_ran, by_name, kernels, on
from test_ffi import array

from jaxgemv import _ffi as ffi


@partial(jax.jit, static_argnames=("bits", "transposed", "y_shape", "image", "rounded"))
def natural_call(
    given, bits: int, transposed: bool, y_shape: tuple[int, ...], image: int = 0, rounded: bool = False
):
    """A hand-made call on a shape that every kernel takes."""
    results = [jax.ShapeDtypeStruct(y_shape, given["x"].dtype)]
    if image:
        results.append(jax.ShapeDtypeStruct((*y_shape[:2], image), np.uint8))
    attributes = {"bits": np.int64(bits), "group": np.int64(128), "transposed": transposed}
    attributes |= {"rounded": True} if rounded else {}
    return jax.ffi.ffi_call(ffi.TARGET, results)(*given.values(), operands=",".join(given), **attributes)[0]


def check_every_name(kernel, transposed: bool) -> None:
    rows = must_take(kernel, transposed)[-2].m or 1
    x, y = (rows, 256), (rows, 256)
    given = {
        "x": array(1, *x, dtype=jnp.dtype(kernel.x)),
        "packed": array(1, 256, 256 * kernel.bits // 32, dtype=np.uint32),
        "scale": array(1, 256, 2, dtype=jnp.dtype(kernel.x)),
    }
    nbytes = 0 if transposed else ffi.backends[kernel.backend].image_bytes(rows, 256, kernel.x, False)
    call = partial(natural_call, bits=kernel.bits, transposed=transposed, y_shape=(1, *y), image=nbytes)
    if kernel.name == "gemm":
        with pytest.raises(jax.errors.JaxRuntimeError, match="no CUDA kernel for this call"):
            jax.block_until_ready(call(given))  # nobody said that it may round
        call = partial(call, rounded=True)
    jax.block_until_ready(call(given))
    assert_ran(kernel)
    operands = {
        "global_scale": array(1),
        "perm": array(1, 256, dtype=np.int32),
        "x_scale": array(1, rows, 1),
    }
    taken = {name for k in ffi.backends[kernel.backend].kernels for name in k.operands}
    kind = "kernel for gradients" if transposed else "kernel"
    for name in operands.keys() - taken:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"jaxgemv: no {kernel.backend} {kind} takes {name}"
        ):
            jax.block_until_ready(call(given | {name: operands[name]}))


@by_name(k for k in kernels(transposed=False) if k.bits in (2, 3, 4, 8))
def test_every_kernel_refuses(kernel):
    """What the call has room for and no kernel takes yet, by its name."""
    check_every_name(kernel, transposed=False)


@pytest.mark.cuda
def test_image_of_x(rng):
    """A second result that is too small for x's image is refused; without one, another kernel runs."""
    with on("cuda"):
        given = {
            "x": rng.integers(-2, 3, (1, 8, 260)).astype(np.float32),
            "packed": rng.integers(0, 1 << 32, (1, 256, 25), dtype=np.uint32),
            "scale": np.ones((1, 256, 3), np.float32),
        }
        call = partial(natural_call, given, bits=3, transposed=False, y_shape=(1, 8, 256))
        nbytes = ffi.backends["cuda"].image_bytes(8, 260, "float32", False)
        enough = jax.block_until_ready(call(image=nbytes))
        assert ffi.last_kernel("cuda") == "mma_any"
        without = jax.block_until_ready(call(image=0))
        assert ffi.last_kernel("cuda") == "simt"
        np.testing.assert_array_equal(enough, without)  # of small integers
        assert np.any(enough)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the second result must be uint8"):
            jax.block_until_ready(call(image=nbytes - 1))


@by_name((k for k in kernels(transposed=True) if k.bits in (2, 3, 4, 8)), "transposed_kernel")
def test_every_transposed_kernel_refuses(transposed_kernel):
    check_every_name(transposed_kernel, transposed=True)
