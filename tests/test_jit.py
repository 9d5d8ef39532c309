"""jit, ahead-of-time compilation, abstract evaluation, donation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make

import jaxgemv
from jaxgemv import gemv, quantize

CASE = Case(4, 12, 72, 24, "zero", bias=True)
FAST = Case(4, 256, 256, 64, "zero", bias=True)


@pytest.mark.parametrize(("bits", "x", "case"), [(3, "float32", CASE), (4, "bfloat16", FAST)], ids=str)
def test_jit(backend, bits, x, case, rng):
    p = make(rng, bits, x, case, exact=True)

    @jax.jit
    def f(x, w, bias):
        return gemv(x, w, bias=bias, out_dtype="float32", implementation=backend)

    np.testing.assert_array_equal(f(p.x, p.tensor, p.bias), p.answer())
    # Weights closed over are constants of the program.
    constant = jax.jit(lambda x: gemv(x, p.tensor, bias=p.bias, out_dtype="float32", implementation=backend))
    np.testing.assert_array_equal(constant(p.x), p.answer())


def test_one_compilation_for_new_values(backend, rng):
    traces = []

    @jax.jit
    def f(x, w):
        traces.append(x)
        return gemv(x, w, implementation=backend)

    for _ in range(3):
        p = make(rng, 4, "float32", CASE, exact=True)
        f(p.x, p.tensor)
    assert len(traces) == 1


def test_ahead_of_time(backend, rng):
    p = make(rng, 4, "bfloat16", FAST, exact=True)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (p.x, p.tensor, p.bias))

    def f(x, w, bias):
        return gemv(x, w, bias=bias, out_dtype="float32", implementation=backend)

    compiled = jax.jit(f).lower(*specs).compile()
    np.testing.assert_array_equal(compiled(p.x, p.tensor, p.bias), p.answer())


@pytest.mark.parametrize(("x", "out"), [("float16", None), ("bfloat16", None), ("bfloat16", "float32")])
def test_eval_shape(x, out, rng):
    p = make(rng, 4, x, CASE)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (p.x, p.tensor))
    y = jax.eval_shape(lambda x, w: gemv(x, w, out_dtype=out), *specs)
    assert (y.shape, y.dtype) == ((4, 12), jnp.dtype(out or x))


def test_fused_with_its_neighbours(backend, rng):
    """As in a model: the result of one product is the x of the next."""
    up = make(rng, 4, "float16", Case(2, 256, 64, 32, "zero"), exact=True)
    down = make(rng, 3, "float32", Case(2, 8, 256, "row", "offset"), exact=True)

    @jax.jit
    def mlp(x, up, down):
        h = jax.nn.relu(gemv(x, up, out_dtype="float32", implementation=backend))
        return gemv(h, down, implementation=backend) + 1

    expected = np.maximum(up.answer(), 0) @ down.weight().T + 1
    np.testing.assert_array_equal(mlp(up.x, up.tensor, down.tensor), expected)


@pytest.mark.parametrize("x", ["float32", "bfloat16"])
def test_donated(backend, x, rng):
    """The result may take the memory of x only if nobody still reads it there."""
    p = make(rng, 4, x, Case(4, 256, 256, 64, "zero"), exact=True)
    f = jax.jit(lambda x, w: gemv(x, w, implementation=backend), donate_argnums=0)
    np.testing.assert_array_equal(f(jnp.array(p.x), p.tensor), p.answer().astype(p.x.dtype))


@pytest.mark.parametrize("x", ["float32", "bfloat16"])
def test_in_place_update_of_a_donated_x(backend, x, rng):
    """XLA may compile this to one buffer that the kernel reads and writes: right, or refused, never garbage."""
    p = make(rng, 4, x, Case(8, 256, 256, 64, "zero"), exact=True)
    f = jax.jit(lambda x, w: x.at[:4].set(gemv(x[:4], w, implementation=backend)), donate_argnums=0)
    try:
        y = jax.block_until_ready(f(jnp.array(p.x), p.tensor))
    except jax.errors.JaxRuntimeError as error:
        assert "share memory" in str(error)  # noqa: PT017  either outcome is fine
    else:
        np.testing.assert_array_equal(y, np.concatenate([p.answer()[:4].astype(p.x.dtype), p.x[4:]]))


def test_disabled(rng):
    """Operation by operation, as for a debugger; what is one operation here stays compiled."""
    p = make(rng, 4, "float32", Case(3, 16, 32, 16, "zero"), exact=True)
    with jax.disable_jit():
        np.testing.assert_array_equal(gemv(p.x, p.tensor), p.answer())
        np.testing.assert_array_equal(jax.vmap(gemv, (0, None))(p.x, p.tensor), p.answer())
        assert jax.grad(lambda x: gemv(x, p.tensor).sum())(p.x).shape == p.x.shape


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 256, 256), (4, 256, 256), (1, 1000, 4096), (1, 40000, 512)])
def test_in_place_update_of_a_donated_bias(backend, rows, n, k, rng):
    """The same of a bias that lies where the result goes: alone it may be of one row, which kernels may compute twice
    in parts."""
    p = make(rng, 4, "bfloat16", Case(rows, n, k, 64, "zero"), exact=True)
    biases = rng.integers(-2, 3, (8, n)).astype(p.x.dtype)

    @partial(jax.jit, donate_argnums=0)
    def f(b, x, w):
        return b.at[:rows].set(gemv(x, w, bias=b[0], implementation=backend))

    expected = (p.answer() + biases[0].astype(np.float64)).astype(p.x.dtype)
    try:
        y = jax.block_until_ready(f(jnp.asarray(biases) + 0, p.x, p.tensor))
    except jax.errors.JaxRuntimeError as error:
        assert rows > 1
        assert "bias and the result share memory" in str(error)  # noqa: PT017  either outcome is fine
    else:
        np.testing.assert_array_equal(y, np.concatenate([expected, biases[rows:]]))


def test_control_flow(backend, rng):
    p = make(rng, 4, "float32", Case(1, 16, 16, "row", "zero"), exact=True)

    @jax.jit
    def f(x, w, n):
        def body(i, x):
            return jax.lax.cond(i % 2 == 0, lambda x: gemv(x, w, implementation=backend) % 5, jnp.negative, x)

        return jax.lax.fori_loop(0, n, body, x)

    expected = p.x.astype(np.float64)
    for i in range(3):
        expected = -expected if i % 2 else (expected @ p.weight().T) % 5
    np.testing.assert_array_equal(f(p.x, p.tensor, 3), expected)


def test_functions_are_plain_functions():
    """Public names carry docstrings and no options that only some of them understand."""
    for bits in range(1, 9):
        assert f"{bits}-bit codes" in getattr(jaxgemv, f"gemv_int{bits}").__doc__


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans(backend, wrap):
    """The product is said to be where NaN comes from."""
    w = quantize(jnp.ones((12, 64)))
    x = jnp.ones((3, 64)).at[1, 2].set(jnp.nan)
    f = wrap(lambda x: gemv(x, w, implementation=backend) * 2)
    with jax.debug_nans(True):
        f(jnp.ones((3, 64)))
        with pytest.raises(FloatingPointError, match="jaxgemv_gemv"):
            f(x)
