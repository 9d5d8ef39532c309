"""Hand-made calls of each kernel by its name: operands that none takes, and room for x's image."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import must_take
from kernels import ROUNDING, assert_ran, by_name, kernels, on
from test_ffi import array

from jaxgemv import _ffi as ffi
from jaxgemv import pack, quantize
from jaxgemv._format import weights


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
    image_bytes = ffi.backends[kernel.backend].image_bytes
    nbytes = 0 if transposed else image_bytes(rows, 256, kernel.format, kernel.x, False)
    call = partial(natural_call, bits=kernel.bits, transposed=transposed, y_shape=(1, *y), image=nbytes)
    if kernel.name in ROUNDING:
        refusal = {
            "cuda": "no CUDA kernel for this call",
            "cpu": "no cpu kernel that may run takes this call",
        }
        with pytest.raises(jax.errors.JaxRuntimeError, match=refusal[kernel.backend]):
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
        nbytes = ffi.backends["cuda"].image_bytes(8, 260, "affine", "float32", False)
        enough = jax.block_until_ready(call(image=nbytes))
        assert ffi.last_kernel("cuda") == "mma_any"
        without = jax.block_until_ready(call(image=0))
        assert ffi.last_kernel("cuda") == "fma"
        np.testing.assert_array_equal(enough, without)  # of small integers
        assert np.any(enough)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the second result must be uint8"):
            jax.block_until_ready(call(image=nbytes - 1))


@by_name((k for k in kernels(transposed=True) if k.bits in (2, 3, 4, 8)), "transposed_kernel")
def test_every_transposed_kernel_refuses(transposed_kernel):
    check_every_name(transposed_kernel, transposed=True)


# The transposed call without x, which gives the weights.


@partial(jax.jit, static_argnames=("y", "attributes"))
def call_without_x(given, y: tuple, attributes: tuple = ()):
    attributes = {"bits": np.int64(3), "group": np.int64(32), "transposed": True} | dict(attributes)
    f = jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct(*y))
    return f(*given.values(), operands=",".join(given), **attributes)


def weight_arrays() -> dict:
    return {"packed": array(1, 6, 6, dtype=np.uint32), "scale": array(1, 6, 2)}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("text", "changes", "y", "attributes"),
    [
        ("k must be that of wider weights", {}, (1, 6, 64), {"k": 65}),
        ("k must be that of wider weights", {"x": array(1, 6, 6)}, (1, 6, 64), {"k": 64}),
        ("k must be an int64", {}, (1, 6, 64), {"k": np.float32(64)}),
        ("the rows of Wq do not hold K codes", {}, (1, 6, 128), {}),
        ("N and K must be at least 1", {}, (1, 6, 64), {"k": 0}),
        ("x must have the N of Wq", {}, (1, 5, 64), {}),
        ("no cuda kernel for gradients takes bias", {"bias": array(1, 6)}, (1, 6, 64), {}),
        ("a batch of x needs an index", {}, (2, 6, 64), {}),
    ],
)
def test_without_x_refused(text, changes, y, attributes):
    attributes = {name: np.int64(a) if isinstance(a, int) else a for name, a in attributes.items()}
    with on("cuda"), pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxgemv: {text}"):
        jax.block_until_ready(
            call_without_x(weight_arrays() | changes, (y, np.dtype(np.float32)), tuple(attributes.items()))
        )


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "width"), [("float16", 61), ("float32", 64)])
def test_without_x_has_no_kernel(dtype, width):
    """For rows that are not whole 16 bytes, and for float32, which XLA's own loop writes as fast."""
    with on("cuda"), pytest.raises(jax.errors.JaxRuntimeError, match="jaxgemv: no CUDA kernel for this call"):
        jax.block_until_ready(call_without_x(weight_arrays(), ((1, 6, width), np.dtype(dtype))))


def test_without_x_on_a_cpu():
    with on("cpu"), pytest.raises(jax.errors.JaxRuntimeError, match="jaxgemv: needs x"):
        jax.block_until_ready(call_without_x(weight_arrays(), ((1, 6, 64), np.dtype(np.float32))))


@pytest.mark.cuda
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_x(bits, dtype, rng):
    """The weights of each entry that an index names, as the reference has them, with zeros behind; NaN for no entry."""
    for n, k, group, form in (
        (40, 256, 64, "zero"),
        (3, 77, 12, "offset"),
        (9, 1, 1, "mid"),
        (70, 1043, 32, "zero"),
        (1090, 2088, 48, "offset"),  # several rows a lane, and several tiles a CTA
    ):
        width, groups, ids = k + -k % 8 + 8, -(-k // group), np.array([2, 0, 3], np.int32)
        w = {
            "packed": pack(rng.integers(0, 1 << bits, (3, n, k), np.uint8), bits),
            "scale": rng.uniform(0.5, 1.5, (3, n, groups)).astype(np.float16),
        }
        if form != "mid":
            w[form] = rng.uniform(-1, 1 << bits, (3, n, groups)).astype(np.float32)
        attributes = {"bits": np.int64(bits), "group": np.int64(group), "k": np.int64(k)}
        with on("cuda"):
            y = call_without_x(
                w | {"index": ids}, ((3, n, width), jnp.dtype(dtype)), tuple(attributes.items())
            )
            assert ffi.last_kernel("cuda") == "dequantize"
        expected = np.asarray(weights(**w, bits=bits, group=group, k=k))[[2, 0]]
        # An offset is added by an FMA, and not after rounding.
        error = np.abs(np.asarray(y[:2, :, :k], np.float64) - expected)
        few = 2.0 ** {"float16": -10, "bfloat16": -7}[dtype]
        assert (error <= few * np.abs(expected) + 2.0**-22 * (1 << bits)).all()
        assert not np.any(y[:2, :, k:])
        assert np.isnan(np.asarray(y[2, :, :k], np.float32)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(34, 192), (1090, 2112)], ids=str)
@pytest.mark.parametrize("format", ["nf4", "iq4_nl", "mxfp4", "nvfp4", "fp8", "mxfp8"])
def test_formats_without_x(format, shape, rng):
    w = quantize(rng.normal(size=shape).astype(np.float32), format=format, method="minmax")
    names = "packed", "scale", "codebook", "global_scale"
    given = {name: jnp.asarray(a)[None] for name in names if (a := getattr(w, name)) is not None}
    given["scale"] = given["scale"].reshape(1, shape[0], -1)
    group = shape[1] // given["scale"].shape[2]
    attributes = {"bits": np.int64(w.bits), "group": np.int64(group), "k": np.int64(shape[1])}
    with on("cuda"):
        y = call_without_x(given, ((1, *shape), jnp.dtype("bfloat16")), tuple(attributes.items()))
        assert ffi.last_kernel("cuda") == "dequantize"
    np.testing.assert_array_equal(y[0], w.dequantize(jnp.bfloat16))
