"""The lowered program, for any platform on any machine: one call where there should be one."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from kernels import set_loop_rows

from jaxgemv import QuantizedTensor, _dispatch, gemv
from jaxgemv._ffi import TARGET, backends

built = pytest.mark.skipif(backends["cuda"].missing is not None, reason="jaxgemv._cuda is not built")
with_kernels = pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=built)])

N, K, LAYERS = 48, 256, 5


@pytest.fixture(autouse=True)
def calls_for_all(monkeypatch):
    """Small weights are here for all others: test_loops.py has when they are no call."""
    set_loop_rows(monkeypatch, "cuda", 0)


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def weight(*stack):
    return QuantizedTensor(
        packed=spec(*stack, N, K // 8, dtype="uint32"),
        scale=spec(*stack, N, 4),
        zero=spec(*stack, N, 4),
        bits=4,
    )


def lowered(platform, f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str, transposed: bool = False) -> list[str]:
    """The lines that call our kernels for products, or for transposed ones."""
    kind = f"transposed = {str(transposed).lower()}"
    return [line for line in text.splitlines() if f"@{TARGET}(" in line and kind in line and '"x,' in line]


def dequantized(text: str) -> list[str]:
    """The lines that call our kernels for the weights themselves."""
    return [line for line in text.splitlines() if f"@{TARGET}(" in line and '"packed,' in line]


@with_kernels
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 3), (64,)])
def test_one_call(platform, rows):
    """And no dequantised matrix, of whatever dtype, beside it."""
    text = lowered(platform, gemv, spec(*rows, K), weight())
    assert len(calls(text)) == 1
    assert not re.search(rf"tensor<(\d+x)*{N}x{K}x", text)


@with_kernels
def test_many_rows_leave_the_kernel(platform):
    """Unless it is asked for."""
    most = backends[platform].most_rows
    assert len(calls(lowered(platform, gemv, spec(most, K), weight()))) == 1
    x = spec(most + 1, K)
    assert not calls(lowered(platform, gemv, x, weight()))
    assert len(calls(lowered(platform, lambda x, w: gemv(x, w, implementation=platform), x, weight()))) == 1


@with_kernels
def test_weights_by_kernel(platform):
    """On a GPU, of large matrices in 16 bits, and unless XLA is asked for."""
    large = QuantizedTensor(packed=spec(1 << 14, 32, dtype="uint32"), scale=spec(1 << 14), bits=4)
    for x, w, implementation, ours in (
        ("bfloat16", large, None, True),
        ("bfloat16", large, "xla", False),
        ("float32", large, None, False),
        ("bfloat16", weight(), None, False),
    ):
        f = partial(gemv, implementation=implementation)
        text = lowered(platform, f, spec(backends[platform].most_rows + 1, K, dtype=x), w)
        assert not calls(text)
        assert len(dequantized(text)) == (ours and platform == "cuda")


@with_kernels
def test_vmap_over_x(platform):
    """More rows of one call: the weights are read once, and are no batch."""
    text = lowered(platform, lambda x, w: jax.vmap(lambda x: gemv(x, w))(x), spec(3, 2, K), weight())
    (call,) = calls(text)
    assert f"tensor<1x6x{K}xbf16>" in call
    assert f"tensor<1x{N}x{K // 8}xui32>" in call


@with_kernels
def test_vmap_over_weights(platform):
    """One indexed call over the stack as it lies there."""
    for x, axes in ((spec(2, K), (None, 0)), (spec(LAYERS, 2, K), (0, 0))):
        text = lowered(platform, jax.vmap(gemv, axes), x, weight(LAYERS))
        (call,) = calls(text)
        assert f"tensor<{LAYERS}x{N}x{K // 8}xui32>" in call


@with_kernels
def test_index_takes_no_slice(platform):
    """Neither of a layer in a loop nor of an expert per row."""

    def layers(x, w):
        return jax.lax.fori_loop(0, LAYERS, lambda i, x: gemv(x, w, index=i)[:, :1] + x, x)

    for f, x in ((layers, spec(2, K)), (lambda x, w: gemv(x, w, index=jnp.arange(3)), spec(3, K))):
        text = lowered(platform, f, x, weight(LAYERS))
        (call,) = calls(text)
        assert f"tensor<{LAYERS}x{N}x{K // 8}xui32>" in call
        taken = [line for line in text.splitlines() if re.search(r"slice|gather", line) and "ui32" in line]
        assert not taken


@with_kernels
def test_scan_over_layers(platform):
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (gemv(x, w)[:, :1] + x, None), x, w)[0]

    assert len(calls(lowered(platform, layers, spec(2, K), weight(LAYERS)))) == 1


@with_kernels
def test_jvp_is_two_calls(platform):
    """The tangent of x goes through the same kernel."""
    text = lowered(
        platform, lambda x, t, w: jax.jvp(lambda x: gemv(x, w), (x,), (t,)), spec(2, K), spec(2, K), weight()
    )
    assert len(calls(text)) == 2


@with_kernels
@pytest.mark.parametrize("many", [False, True])
def test_gradient_is_one_call_each_way(platform, many):
    """And no dequantised matrix, of whatever dtype, up to so many rows."""
    rows = backends[platform].gradient_rows + many
    text = lowered(
        platform,
        lambda x, w, ct: jax.vjp(lambda x: gemv(x, w), x)[1](ct),
        spec(rows, K),
        weight(),
        spec(rows, N),
    )
    assert len(calls(text, transposed=True)) == (not many)
    assert bool(re.search(rf"tensor<(\d+x)*{N}x{K}x", text)) == many


@built
def test_parts_of_large_weights(monkeypatch):
    """Without a norm: inside of one or two rows of x, and on Hopper of many that meet large weights."""

    def inside(rows, n, capability=9, **parts):
        monkeypatch.setattr(_dispatch, "_capability", lambda: capability)
        jax.clear_caches()  # of what was lowered for another GPU
        w = QuantizedTensor(packed=spec(n, 512, dtype="uint32"), scale=spec(n, 32), bits=4)
        (call,) = calls(lowered("cuda", lambda x, w: gemv(x, w, **parts), spec(rows, 4096), w))
        return "activation = " in call or "residual" in call

    gated = {"activation": "swiglu"}
    assert [rows for rows in (2, 3, 8, 9, 16, 64) if inside(rows, 28672, **gated)] == [2, 9, 16, 64]
    assert [rows for rows in (2, 9, 16, 17, 64) if inside(rows, 8192, **gated)] == [2, 17, 64]
    assert not inside(64, 4096, **gated)
    assert not inside(16, 28672, capability=8, **gated)
    assert inside(16, 28672, residual=jnp.ones((16, 28672), jnp.bfloat16))


@with_kernels
def test_derivatives_of_derivatives(platform):
    """Each product is the other's transpose, so that all of them are kernels."""

    def loss(x, w):
        return jnp.sum(gemv(x, w).astype(jnp.float32) ** 2)

    def forward(x, t, w):
        return jax.jvp(lambda x: jax.grad(loss)(x, w), (x,), (t,))

    def reverse(x, t, w):
        dx, pull = jax.vjp(lambda x: jax.grad(loss)(x, w), x)
        return dx, pull(t)

    for f in (forward, reverse):
        text = lowered(platform, f, spec(2, K), spec(2, K), weight())
        assert (len(calls(text)), len(calls(text, transposed=True))) == (2, 2)
        assert not re.search(rf"tensor<(\d+x)*{N}x{K}x", text)


@with_kernels
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
def test_what_has_a_kernel(platform, bits, x):
    """The table of kernels says what is lowered to a call, and covers all of it."""
    w = QuantizedTensor(packed=spec(N, K * bits // 32, dtype="uint32"), scale=spec(N), bits=bits)
    assert backends[platform].find(bits, x)
    assert len(calls(lowered(platform, gemv, spec(K, dtype=x), w))) == 1


@with_kernels
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_codebook_has_one(platform, bits, x):
    """On a GPU int8 x is float16 for it."""
    w = QuantizedTensor(
        packed=spec(N, K * bits // 32, dtype="uint32"), scale=spec(N), codebook=spec(1 << bits), bits=bits
    )
    assert len(calls(lowered(platform, gemv, spec(K, dtype=x), w))) == 1


@with_kernels
def test_what_has_none(platform):
    """On a GPU exact sums of integers; the CPU has kernels of them."""
    integer = QuantizedTensor(packed=spec(N, K // 8, dtype="uint32"), scale=None, bits=4)
    text = lowered(platform, gemv, spec(K, dtype="int8"), integer)
    assert bool(calls(text)) == (platform == "cpu")
    assert not calls(lowered(platform, lambda x, w: gemv(x, w, implementation="xla"), spec(K), weight()))


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms(platform):
    """The reference, in operations that every platform knows."""
    text = lowered(platform, gemv, spec(2, K), weight())
    assert "custom_call" not in text
    assert "dot_general" in text


def test_one_operation_in_the_jaxpr():
    """Every public way is the same primitive, bound once."""
    jaxpr = jax.make_jaxpr(gemv)(
        jnp.zeros(K, jnp.bfloat16), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), weight())
    )
    assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["jaxgemv_gemv"]
