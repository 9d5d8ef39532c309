"""What indexed products need besides their operands and results: memory that grows with x, not with its square, and not
with a matrix for each row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from test_lowering import lowered, spec
from tolerance import assert_close

import jaxgemv
from jaxgemv import QuantizedTensor, gemv
from jaxgemv import _grouped as grouped

CPU = {"implementation": "cpu"}
XLA = {"implementation": "xla"}


def stack(entries: int, n: int, k: int) -> QuantizedTensor:
    return QuantizedTensor(
        packed=spec(entries, n, k // 8, dtype="uint32"),
        scale=spec(entries, n, k // 128, dtype="float32"),
        bits=4,
    )


def temporaries(f, *args) -> int:
    """Bytes, of the program compiled for a CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def bytes_of(*shape) -> int:
    return 4 * int(np.prod(shape))


@pytest.mark.parametrize("options", [{}, XLA, CPU], ids=str)
def test_an_index_for_each_of_many_rows(options):
    """Three experts: 38400 rows are not compared with 38400."""
    x = spec(64, 600, 1024, dtype="float32")
    ids = spec(64, 600, dtype="int32")
    used = temporaries(lambda x, w, i: gemv(x, w, index=i, **options), x, stack(3, 512, 1024), ids)
    assert used < 5 * bytes_of(*x.shape)


@pytest.mark.parametrize("options", [{}, XLA], ids=str)
@pytest.mark.parametrize("slices", [24, 96])
def test_many_rows_for_each_of_many_slices(slices, options):
    """Each slice is enough to dequantise a matrix for, but there is never one for each slice."""
    n = k = 2048
    x, ids = spec(slices, 600, k, dtype="float32"), spec(slices, dtype="int32")
    used = temporaries(lambda x, w, i: gemv(x, w, index=i, **options), x, stack(16, n, k), ids)
    # Some matrices beside each other, and codes on their way to float32.
    assert used < 3 * (64 << 20) + 2 * bytes_of(*x.shape)
    if slices == 96:
        assert used < bytes_of(slices, n, k)


def test_layers_one_after_another():
    """Each by its number: none is taken out of the stack."""
    w = stack(3, 512, 512)

    def run(x, w):
        for i in range(3):
            x = gemv(x, w, index=i, implementation="cpu")
        return x

    assert temporaries(run, spec(1, 512), w) < 512 * 512 // 16


@pytest.mark.parametrize("part", ["bias", "norm", "global_scale"])
def test_a_part_for_each_row_beside_one_stack(part, rng):
    """vmap over it alone copies no stack."""
    w = jaxgemv.quantize(rng.standard_normal((3, 64, 256), np.float32), format="nvfp4")
    values = rng.standard_normal((8, 3, *{"bias": (64,), "norm": (256,)}.get(part, ()))).astype(np.float32)
    x, ids = rng.standard_normal(256).astype(np.float32), np.arange(8, dtype=np.int32) % 4

    def one(a, i):
        given = {} if part == "global_scale" else {part: a}
        tensor = dataclasses.replace(w, global_scale=a) if part == "global_scale" else w
        return gemv(x, tensor, index=i, activation="silu", **given)

    f = jax.vmap(one)
    y = f(values, ids)
    alone = [one(a, i) for a, i in zip(values, ids) if i < 3]
    np.testing.assert_allclose(y[ids < 3], alone, rtol=1e-4, atol=1e-5)
    assert np.isnan(y[ids == 3]).all()
    assert temporaries(f, values, ids) < w.nbytes


def test_dense_stack():
    n = k = 1024
    x, ids = spec(96, 600, k, dtype="float32"), spec(96, dtype="int32")
    used = temporaries(lambda x, w, i: gemv(x, w, index=i), x, spec(8, n, k, dtype="float32"), ids)
    assert used < 2 * (64 << 20) + bytes_of(*x.shape)


def test_gradient_with_respect_to_scale():
    """Differentiated, the reference keeps x and ids, and dequantises anew."""
    n = k = 1024
    x, ids = spec(96, 80, k, dtype="float32"), spec(96, dtype="int32")

    def loss(scale, x, w, i):
        w = QuantizedTensor(packed=w.packed, scale=scale, bits=4)
        return gemv(x, w, index=i, **XLA).sum()

    w = stack(4, n, k)
    used = temporaries(jax.grad(loss), w.scale, x, w, ids)
    assert used < 4 * (64 << 20) + 3 * bytes_of(*x.shape)
    assert used < bytes_of(96, n, k)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_matrix_for_each_slice_in_the_program(platform):
    """On any platform: neither packed codes nor weights are gathered."""
    args = spec(128, 600, 4096), stack(8, 4096, 4096), spec(128, dtype="int32")
    text = lowered(platform, lambda x, w, i: gemv(x, w, index=i), *args)
    assert "tensor<128x4096x" not in text


@pytest.mark.parametrize(
    ("dense", "slices", "rows"),
    [(False, 5, 600), (False, 40, 1), (False, 40, 3), (False, 40, 600), (True, 5, 1), (True, 40, 600)],
)
def test_values(dense, slices, rows, rng):
    """In tiles, side by side or one after another; also out of range."""
    problems = [make(rng, 4, "float32", Case(1, 24, 128, 32, "zero")) for _ in range(3)]
    w = jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems))
    w = w.dequantize(jnp.float32) if dense else w
    x = rng.standard_normal((slices, rows, 128)).astype(np.float32)
    ids = rng.integers(-1, 4, slices).astype(np.int32)
    y = np.asarray(gemv(x, w, index=ids, **{} if dense else XLA))
    for i, e in enumerate(ids):
        if not 0 <= e < 3:
            assert np.isnan(y[i]).all()
            continue
        exact = x[i].astype(np.float64) @ problems[e].weight().T
        assert_close(
            y[i], exact, np.abs(x[i]) @ problems[e].weight_magnitude().T, 128, dtype=np.float32, worst=dense
        )


def test_one_after_another(monkeypatch, rng):
    """With no room for two matrices at a time."""
    monkeypatch.setattr("jaxgemv._reference._SIDE_BY_SIDE", 1)
    test_values(False, 5, 3, rng)


# Routing


@pytest.mark.parametrize(("batch", "size", "stack"), [(7, 2, 200), (7, 5, 1), (500, 16, 3)])
def test_both_ways_to_route(batch, size, stack, rng):
    """Comparing all with all, and sorting: the same slots."""
    slots = grouped._tiles(batch, stack, size) * size
    for low, high in ((0, stack), (-2, stack + 2), (stack, stack + 5)):
        index = jnp.asarray(rng.integers(low, high, batch).astype(np.int32))
        one = grouped._by_comparing(index, stack, size, slots)
        other = grouped._by_sorting(index, stack, size, slots)
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("platform", grouped._COMPARED)
def test_routing_is_not_quadratic(platform):
    """64k ids were 4e9 comparisons."""
    batch = 1 << 16
    x, ids = spec(batch, 8, dtype="float32"), spec(batch, dtype="int32")

    def f(x, ids):
        call = lambda x, i: x * i[:, None, None].astype(x.dtype)  # noqa: E731
        return grouped.in_tiles(call, x[:, None], ids, stack=8, size=16, platform=platform)

    assert jax.jit(f).lower(x, ids).compile().cost_analysis()["flops"] < batch * 2000
