"""jax.export: serialize, load, run; with a symbolic batch; for several platforms; with derivatives."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

import jaxgemv
from jaxgemv import gemv
from jaxgemv._ffi import TARGET

CASE = Case(4, 256, 256, 64, "zero", bias=True)
K = CASE.k


def export(f, *args, **kwargs):
    """Through bytes and back."""
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    exported = jax.export.export(jax.jit(f), disabled_checks=jaxgemv.EXPORT_CHECKS, **kwargs)(*specs)
    return jax.export.deserialize(exported.serialize(vjp_order=1))


def platforms_of(backend):
    """Of the device that the test runs on; by default it would be that of the best one."""
    return None if backend == "xla" else (backend,)


@pytest.fixture
def f(backend):
    # Leaves and no QuantizedTensor: a loading program need not know the class.
    def f(x, packed, scale, zero, bias):
        return jaxgemv.gemv_int4(
            x, packed, zero, scale, bias=bias, out_dtype="float32", implementation=backend
        )

    return f


def problem_of(rng, x: str):
    p = make(rng, 4, x, CASE, exact=True)
    return p, (p.x, p.packed, p.scale, p.zero, p.bias)


@pytest.fixture
def problem(rng):
    return problem_of(rng, "float32")


@pytest.mark.parametrize("x", ["float32", "bfloat16"])
def test_round_trip(f, backend, x, rng):
    p, args = problem_of(rng, x)
    exported = export(f, *args, platforms=platforms_of(backend))
    assert (TARGET in exported.mlir_module()) == (backend != "xla")
    np.testing.assert_array_equal(exported.call(*args), p.answer())


def test_vjp(f, backend, problem):
    p, args = problem
    call = export(f, *args, platforms=platforms_of(backend)).call
    grad = jax.grad(lambda x: call(x, *args[1:]).sum())(jnp.asarray(p.x))
    np.testing.assert_array_equal(grad, np.broadcast_to(p.weight().sum(0), grad.shape))


def test_gradient(f, backend, problem):
    """A program that is a gradient, and calls the transposed kernel."""
    p, args = problem
    exported = export(jax.grad(lambda *args: f(*args).sum()), *args, platforms=platforms_of(backend))
    assert ("transposed = true" in exported.mlir_module()) == (backend != "xla")
    np.testing.assert_array_equal(exported.call(*args), np.broadcast_to(p.weight().sum(0), p.x.shape))


@pytest.mark.parametrize("k", [256, 250])
def test_tensor(k, backend, rng):
    """As it is, with what its arrays do not tell."""
    p = make(rng, 3, "float32", Case(2, 48, k, 64, "zero"), exact=True)
    exported = export(jaxgemv.gemv, p.x, p.tensor, platforms=platforms_of(backend))
    np.testing.assert_array_equal(exported.call(p.x, p.tensor), p.answer())
    tensor = export(lambda w: jax.tree.map(lambda a: a, w), p.tensor).call(p.tensor)
    assert (tensor.bits, tensor.group_size, tensor.k) == (p.tensor.bits, p.tensor.group_size, p.tensor.k)


@pytest.mark.parametrize("rows", ["4", "c"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_symbolic_batch_of_indices(implementation, rows, problem):
    """For GPUs, which have scratch for each slice of x; and of rows alone, without kernels."""
    tensor = jax.tree.map(lambda a: jnp.stack([a, a]), problem[0].tensor)
    f = jax.jit(lambda x, index: jaxgemv.gemv(x, tensor, index=index, implementation=implementation))
    for batch in ("b", "2"):
        shape = jax.export.symbolic_shape(f"{batch}, {rows}, {K}")
        specs = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        for platform in ("cuda", "cpu", "tpu"):
            jax.export.export(f, platforms=(platform,), disabled_checks=jaxgemv.EXPORT_CHECKS)(*specs)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cpu", "tpu", "cuda")])
def test_platforms(platforms, problem):
    """Each platform gets its own way: a kernel where there is one."""
    p, args = problem
    with jax.default_device(jax.devices("cpu")[0]):
        f = lambda x, packed, scale, zero: jaxgemv.gemv_int4(x, packed, zero, scale)  # noqa: E731
        exported = export(f, *args[:4], platforms=platforms)
        assert exported.platforms == platforms
        np.testing.assert_array_equal(exported.call(*args[:4]), p.answer() - p.bias)


@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
def test_symbolic_batch(implementation, problem):
    """One program for any number of rows; which way it goes is decided without knowing how many."""
    p, args = problem
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, K), jnp.float32)

    def f(x, *rest):
        return jaxgemv.gemv_int4(x, rest[0], rest[2], rest[1], implementation=implementation)

    with jax.default_device(jax.devices("cpu")[0]):
        call = jax.export.deserialize(
            jax.export.export(jax.jit(f), platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)(
                x, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args[1:4])
            ).serialize()
        ).call
        for m in (1, 3, 65):
            x = np.resize(p.x, (m, K))
            np.testing.assert_array_equal(call(x, *args[1:4]), x @ p.weight().T)


@pytest.mark.parametrize("m", [4, 64, 65])
@pytest.mark.parametrize("x", ["bfloat16", "int8"])
@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda")], ids="-".join)
def test_symbolic_weight(platforms, x, m, rng):
    """One program for matrices of any N: which kernels take it is decided without knowing how many rows there are."""
    p = make(rng, 4, x, Case(m, 24, 64, 32, "zero"))
    (n,) = jax.export.symbolic_shape("n")
    w = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), p.tensor)
    given = {"x_scale": np.ones((m, 1), np.float32)} if x == "int8" else {}

    def f(x, w):
        return gemv(x, w, activation="silu", out_dtype="float32", **given)

    def of_x(x, w):
        return jax.grad(lambda x: f(x, w).sum())(x)

    for g in (f,) if x == "int8" else (f, of_x):
        exported = jax.export.export(jax.jit(g), platforms=platforms, disabled_checks=jaxgemv.EXPORT_CHECKS)
        call = jax.export.deserialize(
            exported(jax.ShapeDtypeStruct(p.x.shape, p.x.dtype), w).serialize()
        ).call
        if "cpu" in platforms:
            with jax.default_device(jax.devices("cpu")[0]):
                expected = np.asarray(g(p.x, p.tensor), np.float32)
                y = np.asarray(call(p.x, p.tensor), np.float32)
            np.testing.assert_allclose(y, expected, rtol=0.02, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("f", "index"),
    [
        (lambda x, w: gemv(x, w, index=2), 2),
        (lambda x, w: gemv(x, w, index=np.int32(1)), 1),
        (lambda x, w: gemv(x, w, index=np.int64(5)), 5),
        (lambda x, w: gemv(x, w, index=-1), -1),
        (lambda x, w: gemv(x, w[2]), 2),
    ],
)
def test_symbolic_stack(f, index, rng):
    """An entry by its number."""
    w = jaxgemv.quantize(rng.standard_normal((3, 24, 64), np.float32), bits=4, group_size=32)
    x = rng.standard_normal(64).astype(np.float32)
    (s,) = jax.export.symbolic_shape("s")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((s, *a.shape[1:]), a.dtype), w)
    export = jax.export.export(jax.jit(f), platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)
    y = export(jax.ShapeDtypeStruct(x.shape, x.dtype), shapes).call(x, w)
    np.testing.assert_array_equal(y, gemv(x, w, index=index))


@pytest.mark.parametrize(
    "format", [{"bits": 4}, {"format": "nvfp4"}, {"format": "fp8", "method": "minmax"}], ids=str
)
def test_quantize_symbolic_weight(format, rng):
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda w: jaxgemv.quantize(w, **format).dequantize())
    exported = jax.export.export(f, platforms=("cpu",))(jax.ShapeDtypeStruct((n, 96), jnp.float32))
    weight = rng.standard_normal((5, 96)).astype(np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(exported.call(weight), f(weight))


def test_gradient_of_symbolic_batch(problem):
    p, _ = problem
    (b,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(
        jax.jit(lambda x: gemv(x, p.tensor)), platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS
    )(jax.ShapeDtypeStruct((b, K), jnp.float32))
    with jax.default_device(jax.devices("cpu")[0]):
        call = jax.export.deserialize(exported.serialize(vjp_order=1)).call
        for m in (1, 65):
            grad = jax.grad(lambda x: call(x).sum())(jnp.ones((m, K)))
            np.testing.assert_array_equal(grad, np.broadcast_to(p.weight().sum(0), grad.shape))


def test_symbolic_batch_under_vmap(problem):
    p, _ = problem
    b, c = jax.export.symbolic_shape("b, c")
    f = jax.jit(jax.vmap(lambda x: gemv(x, p.tensor)))
    exported = jax.export.export(f, platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)(
        jax.ShapeDtypeStruct((b, c, K), jnp.float32)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        y = exported.call(np.stack([p.x, p.x]))
        np.testing.assert_array_equal(y[1], p.answer() - p.bias)


def test_another_process(problem, tmp_path):
    """Loads with nothing but `import jaxgemv`, which registers the kernels; JAX says what it misses without."""
    p, _ = problem
    exported = jax.export.export(
        jax.jit(lambda x: gemv(x, p.tensor)), platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS
    )(jax.ShapeDtypeStruct(p.x.shape, p.x.dtype))
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", p.x)
    script = """
import sys, pathlib, jax, jax.export, numpy as np
here = pathlib.Path(sys.argv[1])
call = jax.export.deserialize(bytearray((here / "program").read_bytes())).call
with jax.default_device(jax.devices("cpu")[0]):
    try:
        jax.block_until_ready(call(np.load(here / "x.npy")))
    except jax.errors.JaxRuntimeError as error:
        print(error)
    import jaxgemv
    np.save(here / "y.npy", call(np.load(here / "x.npy")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert f"No FFI handler registered for {TARGET}" in done.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), p.answer() - p.bias)
