"""The boundary to C++: registration, the version guard, index arithmetic, and calls that no Python code has checked."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import ISAS, compiled, kernels, set_cpu_isa

from jaxgemv import QuantizedTensor, _dispatch, gemv
from jaxgemv import _ffi as ffi
from jaxgemv._operands import FACTS, Operands, Static


def test_cpu_backend_loaded():
    """The CPU's is built always; without it the other tests would test the reference twice."""
    assert ffi.backends["cpu"].missing is None
    for transposed in (False, True):
        kernels = [k for k in ffi.backends["cpu"].kernels if k.transposed == transposed and k.x != "int8"]
        assert {(k.bits, k.x) for k in kernels} == ALL


@pytest.mark.cuda
def test_cuda_backend_loaded():
    assert {(k.bits, k.x) for k in ffi.backends["cuda"].kernels} == ALL


ALL = {(bits, x) for bits in range(1, 9) for x in ("float16", "bfloat16", "float32")}


def test_offsets_are_64_bit():
    """The bytes before a code pass 2^31 in a stack of experts; no test could hold such an array."""
    from jaxgemv._cpu import packed_offset

    for bits in range(1, 9):
        n, k, k_total = 1 << 22, 8192 - 8, 8192
        expected = n * (k_total * bits // 8) + k * bits // 8
        assert expected > 2**31
        assert packed_offset(n, k, k_total, bits) == expected
    assert packed_offset(1 << 40, 0, 33, 3) == (1 << 40) * 16
    assert packed_offset(0, 1 << 40, 1 << 41, 8) == 1 << 40


def test_runtime_version():
    assert ffi._runtime_ffi_minor() >= 1  # 0.1 is what we build for


def test_version_guard(monkeypatch):
    """Too new an extension is not registered: XLA would fail the first operation of the user's program."""
    monkeypatch.setattr(ffi, "_runtime_ffi_minor", lambda: 0)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", pytest.fail)
    with pytest.warns(
        RuntimeWarning, match=r"jaxgemv\._cpu is built for XLA FFI 0\.\d+, but jaxlib .* has 0\.0; its"
    ):
        backend = ffi._load("jaxgemv._cpu", "cpu")
    assert backend.kernels == ()
    assert re.fullmatch(r"built for XLA FFI 0\.\d+, but jaxlib .* has 0\.0", backend.missing)


def test_extension_for_a_newer_ffi(tmp_path):
    """A jaxlib that is older than the extension: a warning each, the reference, and JAX as it was."""
    header = tmp_path / "include/xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MINOR 0\n")
    script = """
import sys, warnings, jaxlib
jaxlib.__file__ = sys.argv[1] + "/__init__.py"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jaxgemv
print(*sorted(str(w.message).split()[0] for w in caught if w.category is RuntimeWarning))
import jax, jax.numpy as jnp
f = jax.jit(lambda x, w: jaxgemv.gemv_int4(x, w, None, 1.0))
args = jnp.ones(64), jnp.full((3, 8), 0x99999999, jnp.uint32)
print("custom_call" in f.lower(*args).as_text(), f(*args))
spd = jnp.array([[4.0, 0.0], [0.0, 9.0]])
print(jnp.linalg.cholesky(spd).sum(), jnp.sort(spd[1]).tolist())  # the first is an FFI call too
try:
    jaxgemv.gemv_int4(*args, None, 1.0, implementation="cpu")
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    warned, product, others, refused = done.stdout.splitlines()
    built = [f"jaxgemv._{name}" for name, backend in ffi.backends.items() if backend.missing is None]
    assert warned.split() == sorted(built)
    assert product == "False [64. 64. 64.]"
    assert others == "5.0 [0.0, 9.0]"
    assert re.search(r"built for XLA FFI 0\.\d+, but jaxlib .* has 0\.0$", refused)


def test_absent_and_broken_modules(monkeypatch, tmp_path):
    (tmp_path / "broken_backend.py").write_text("raise ImportError('libmissing.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    assert ffi._load("absent_backend", "cpu") == ffi.Backend((), "not built")
    reason = "cannot be loaded: libmissing.so.1: cannot open"
    assert ffi._load("broken_backend", "cpu") == ffi.Backend((), reason)


def test_reference_takes_over(monkeypatch):
    """Without a backend the same call works."""
    monkeypatch.setitem(ffi.backends, "cpu", ffi.Backend((), "not built"))
    w = QuantizedTensor(packed=jnp.zeros((3, 5), jnp.uint32), scale=jnp.float32(1), bits=5)
    traced = jax.jit(lambda x: gemv(x, w)).trace(jnp.ones(32))
    assert ffi.TARGET not in traced.lower(lowering_platforms=("cpu",)).as_text()


GOOD = {
    "x": np.ones((1, 2, 64), np.float32),
    "packed": np.zeros((1, 6, 8), np.uint32),
    "scale": np.ones((1, 6, 4), np.float32),
    "y": jax.ShapeDtypeStruct((1, 2, 6), np.float32),
    "bits": np.int64(4),
    "group": np.int64(16),
    "transposed": False,
}


def array(*shape, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD = (
    ("x, Wq and y must have rank 3", {"x": array(2, 64)}),
    ("x, Wq and y must have rank 3", {"packed": array(6, 8, dtype=np.uint32)}),
    ("x and y must be float16, bfloat16 or float32", {"x": array(1, 2, 64, dtype=np.int32)}),
    ("bits must be 1..8", {"bits": np.int64(9)}),
    ("N and K must be at least 1", {"packed": array(1, 0, 8, dtype=np.uint32)}),
    ("y must have shape (batch, M, N)", {"y": jax.ShapeDtypeStruct((1, 2, 7), np.float32)}),
    ("Wq must be uint32, uint8, float8_e4m3fn or float8_e5m2", {"packed": array(1, 6, 8, dtype=np.int32)}),
    ("the rows of Wq do not hold K codes", {"x": array(1, 2, 65)}),
    ("the rows of Wq do not hold K codes", {"bits": np.int64(5)}),
    (
        "scale has the wrong shape or dtype",
        {"packed": array(2, 6, 8, dtype=np.uint32), "scale": array(3, 6, 4)},
    ),
    (
        "only one of zero, offset, codebook and a float8 Wq can be given",
        {"zero": array(1, 6, 4), "offset": array(1, 6, 4)},
    ),
    ("scale has the wrong shape or dtype", {"scale": array(1, 5, 4)}),
    ("scale has the wrong shape or dtype", {"scale": array(1, 6, 3)}),
    ("scale has the wrong shape or dtype", {"scale": array(0)}),
    ("zero or offset has the wrong shape or dtype", {"zero": array(0)}),
    ("index must hold one int32 for each slice of x", {"index": array(0, dtype=np.int32)}),
    ("needs scale", {"scale": None}),
    ("needs x", {"x": None}),
    ("no operand is called shift", {"shift": array(1, 6, 4)}),
    ("no operand is called ", {"operands": "x,,scale"}),
    ("no operand is called activation", {"operands": "x,packed,activation"}),
    ("scale is named twice", {"operands": "x,scale,scale"}),
    ("operands names more than there are", {"operands": "x,packed,scale,zero"}),
    ("operands must name every array", {"operands": "x,packed"}),
    ("needs operands, bits, group and transposed", {"bits": np.int32(4)}),
    ("needs operands, bits, group and transposed", {"transposed": np.int64(0)}),
    ("has an attribute that this version does not know", {"rounding": np.int64(1)}),
    ("entry must be an int64", {"entry": np.int32(0)}),
    ("entry must be one of the stack, and without index", {"entry": np.int64(1)}),
    ("entry must be one of the stack, and without index", {"entry": np.int64(-1)}),
    (
        "entry must be one of the stack, and without index",
        {"entry": np.int64(0), "index": array(1, dtype=np.int32)},
    ),
    ("scale has the wrong shape or dtype", {"scale": array()}),
    ("bias has the wrong shape or dtype", {"bias": array()}),
    ("scale has the wrong shape or dtype", {"scale": array(1, 6, 4, dtype=np.int32)}),
    ("scale has the wrong shape or dtype", {"group": np.int64(0)}),
    ("scale has the wrong shape or dtype", {"group": np.int64(-5)}),
    ("zero or offset has the wrong shape or dtype", {"zero": array(1, 6, 5)}),
    ("zero or offset has the wrong shape or dtype", {"offset": array(1, 1, 6, 4)}),
    ("bias has the wrong shape or dtype", {"bias": array(1, 5)}),
    ("bias has the wrong shape or dtype", {"bias": array(6)}),
    ("index must hold one int32 for each slice of x", {"index": array(2, dtype=np.int32)}),
    ("index must hold one int32 for each slice of x", {"index": array(1)}),
    ("Wq must have an entry unless there is an index", {"packed": array(0, 6, 8, dtype=np.uint32)}),
    ("a batch of x needs an index", {"x": array(2, 2, 64), "y": jax.ShapeDtypeStruct((2, 2, 6), np.float32)}),
)


TRANSPOSED = {
    "x": array(1, 2, 6) + 1,
    "y": jax.ShapeDtypeStruct((1, 2, 64), np.float32),
    "transposed": True,
}

BAD_TRANSPOSED = (
    ("x, Wq and y must have rank 3", {"x": array(2, 6)}),
    ("x must have the N of Wq", {"x": array(1, 2, 7)}),
    ("y must have shape (batch, M, N), (batch, M, N / 2)", {"x": array(1, 3, 6)}),
    ("the rows of Wq do not hold K codes", {"y": jax.ShapeDtypeStruct((1, 2, 65), np.float32)}),
    ("N and K must be at least 1", {"packed": array(1, 0, 8, dtype=np.uint32)}),
    ("scale has the wrong shape or dtype", {"scale": array(1, 6, 3)}),
    (
        "a batch of x needs an index",
        {"x": array(2, 2, 6), "y": jax.ShapeDtypeStruct((2, 2, 64), np.float32)},
    ),
)


def call(**given):
    """The custom call as a program from elsewhere might make it."""
    given = {name: value for name, value in given.items() if value is not None}
    y = given.pop("y")
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    attributes = {"operands": ",".join(arrays)} | {n: v for n, v in given.items() if n not in arrays}
    f = jax.jit(lambda *args: jax.ffi.ffi_call(ffi.TARGET, y)(*args, **attributes))
    return jax.block_until_ready(f(*arrays.values()))


@compiled
def test_hand_made_call(backend):
    np.testing.assert_array_equal(call(**GOOD), np.full((1, 2, 6), -8 * 64))


@compiled
@pytest.mark.parametrize(("text", "change"), BAD, ids=[f"{','.join(c)}-{t[:30]}" for t, c in BAD])
def test_bad_hand_made_call(backend, text, change):
    """An exception, and the process lives on."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"jaxgemv: {text}")):
        call(**GOOD | change)
    np.testing.assert_array_equal(call(**GOOD), np.full((1, 2, 6), -8 * 64))


# What the call has room for, and no kernel takes yet.
FUTURE = {
    "codebook": array(1, 16),
    "global_scale": array(1),
    "perm": array(1, 64, dtype=np.int32),
    "x_scale": array(1, 2, 1),
    "norm": array(1, 64),
    "residual": array(1, 2, 6),
    "activation": "silu",
    "one_byte_scale": array(1, 6, 4, dtype=jnp.float8_e4m3fn),
}


@compiled
@pytest.mark.parametrize("name", FUTURE)
def test_operand_that_no_kernel_takes(backend, name):
    """Refused by its name, and never ignored; lowering asks the same table."""
    if any(name in kernel.operands for kernel in ffi.backends[backend].kernels):
        pytest.skip(f"there is a kernel that takes {name}")
    given = {"scale" if name == "one_byte_scale" else name: FUTURE[name]}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jaxgemv: no {backend} kernel takes {name}"):
        call(**GOOD | given)


@pytest.fixture
def use_isa():
    """set_cpu_isa, and the best one again afterwards."""
    yield set_cpu_isa
    set_cpu_isa(ISAS[0])


def test_imaginary_operand(monkeypatch, use_isa):
    """A fact that nobody has told the kernels of is refused by all of them, and never ignored."""
    facts = _dispatch.facts
    monkeypatch.setattr(_dispatch, "facts", lambda o, s: facts(o, s) | {"imaginary"})
    monkeypatch.setattr(_dispatch, "FACTS", (*FACTS, "imaginary"))
    for transposed in (False, True):
        for kernel in kernels(transposed):
            use_isa(kernel.isa or ISAS[0])
            bits, x, k = kernel.bits, jnp.dtype(kernel.x), 256
            o = Operands(
                x=jax.ShapeDtypeStruct((2, 64 if transposed else k), x),
                packed=jax.ShapeDtypeStruct((64, k * bits // 32), jnp.uint32),
                scale=jax.ShapeDtypeStruct((64, 2), x),
            )
            s = Static("gemv", bits, 128, x, k=k if transposed else None)
            assert _dispatch.kernels_for(kernel.backend, o, s) == []
            assert not _dispatch.fuses(kernel.backend, o, s)
            reason = _dispatch.why_no_kernel(kernel.backend, o, s)
            assert reason.endswith(
                f"{'kernel for gradients' if transposed else 'kernel'} that takes imaginary"
            )
    use_isa(ISAS[0])
    w = QuantizedTensor(packed=jnp.zeros((3, 8), jnp.uint32), scale=jnp.float32(1), bits=4)
    text = jax.jit(lambda x: gemv(x, w)).trace(jnp.ones(64)).lower(lowering_platforms=("cpu",)).as_text()
    assert ffi.TARGET not in text
    with pytest.raises(NotImplementedError, match="takes imaginary"):
        jax.jit(lambda x: gemv(x, w, implementation="cpu")).lower(jnp.ones(64))


@compiled
def test_bias_of_a_gradient(backend):
    """What the products take, the transposed ones need not."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no {backend} kernel for gradients takes bias"):
        transposed_call(bias=array(1, 6))


def test_names_of_operands():
    """C++ and Python know the same ones, in the same order; an extension of other sources is not used."""
    from jaxgemv._cpu import operands

    assert tuple(operands()) == FACTS


def test_extension_of_other_sources(monkeypatch):
    monkeypatch.setattr(ffi, "FACTS", FACTS[:-1])
    monkeypatch.setattr(jax.ffi, "register_ffi_target", pytest.fail)
    with pytest.warns(RuntimeWarning, match=r"jaxgemv\._cpu is built from other sources than these Python"):
        assert ffi._load("jaxgemv._cpu", "cpu").kernels == ()


@compiled
def test_result_in_the_place_of_x(backend, rng):
    """XLA's in-place updates can make one buffer of both: right where x is copied first, refused elsewhere."""
    x = rng.integers(-2, 3, (1, 5, 64)).astype(np.float32)
    packed = rng.integers(0, 2**32, (1, 64, 8), dtype=np.uint32)
    others = packed, np.float32([1])
    y = jax.ShapeDtypeStruct(x.shape, x.dtype)
    f = jax.jit(
        lambda x, *others: jax.ffi.ffi_call(ffi.TARGET, y, input_output_aliases={0: 0})(
            x, *others, operands="x,packed,scale", bits=np.int64(4), group=np.int64(64), transposed=False
        ),
        donate_argnums=0,
    )
    given = jnp.asarray(x) + 0  # in memory that is XLA's to give away
    if backend == "cuda":
        with pytest.raises(jax.errors.JaxRuntimeError, match="x and the result share memory"):
            jax.block_until_ready(f(given, *others))
    else:
        place = given.unsafe_buffer_pointer()
        result = f(given, *others)
        assert result.unsafe_buffer_pointer() == place
        w = QuantizedTensor(packed=packed[0], scale=np.float32(1), bits=4)
        np.testing.assert_array_equal(result[0], x[0] @ np.asarray(w.dequantize(jnp.float32)).T)


def transposed_call(**change):
    return call(**GOOD | TRANSPOSED | change)


@compiled
def test_hand_made_transposed_call(backend):
    """An index out of range gives NaN here too."""
    np.testing.assert_array_equal(transposed_call(), np.full((1, 2, 64), -8 * 6))
    index = {"index": np.array([0, -1, 1], np.int32), "x": array(3, 2, 6) + 1}
    y = transposed_call(**index, y=jax.ShapeDtypeStruct((3, 2, 64), np.float32))
    np.testing.assert_array_equal(y[0], np.full((2, 64), -8 * 6))
    assert np.isnan(y[1:]).all()


@compiled
@pytest.mark.parametrize(
    ("text", "change"), BAD_TRANSPOSED, ids=[f"{','.join(c)}-{t[:30]}" for t, c in BAD_TRANSPOSED]
)
def test_bad_transposed_call(backend, text, change):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"jaxgemv: {text}")):
        transposed_call(**change)
    np.testing.assert_array_equal(transposed_call(), np.full((1, 2, 64), -8 * 6))
