"""Attention of one token: the kernel in each instruction set, and plain JAX, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from kernels import on

from jaxgemv import attention
from jaxgemv._ffi import ATTEND, backends

SHAPES = [  # heads, kv_heads, S, D
    (16, 4, 256, 64),
    (9, 3, 33, 64),
    (8, 8, 40, 80),
    (7, 1, 65, 96),
    (12, 2, 17, 33),
    (32, 8, 128, 128),
    (4, 2, 1, 8),
    (1, 1, 19, 1),
]
RTOL = {jnp.float32: 2e-6, jnp.float16: 2e-3, jnp.bfloat16: 1.5e-2}


def arrays(rng, heads, kv_heads, size, width, dtype=jnp.float32, lead=()):
    shapes = (heads, width), (kv_heads, size, width), (kv_heads, size, width)
    return tuple(jnp.asarray(rng.standard_normal((*lead, *shape)), dtype) for shape in shapes)


def expected(q, k, v, position, window=0, scale=None):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (heads, width), kv_heads = q.shape, len(k)
    first = max(0, position + 1 - window) if window else 0
    k, v = (np.repeat(a[:, first : position + 1], heads // kv_heads, axis=0) for a in (k, v))
    scores = np.einsum("hd,hsd->hs", q, k) * (width**-0.5 if scale is None else scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hs,hsd->hd", weights / weights.sum(axis=-1, keepdims=True), v)


def assert_close(y, wanted, dtype):
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, atol=RTOL[dtype] * np.abs(wanted).max())


@pytest.fixture(params=["kernel", "plain"])
def has_kernel(request, monkeypatch, on_cpu):
    if request.param == "plain":
        monkeypatch.setitem(backends, "cpu", backends["cpu"]._replace(missing="for this test"))
    elif backends["cpu"].missing:
        pytest.skip("no CPU kernels")
    return request.param == "kernel"


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(rng, isa, shape, dtype):
    q, k, v = arrays(rng, *shape, dtype)
    attend = jax.jit(attention.one_token)
    assert ATTEND in attend.lower(q, k, v, 0).as_text()
    for position in {0, shape[2] // 2, shape[2] - 1}:
        y = attend(q, k, v, position)
        assert (y.shape, y.dtype) == (q.shape, dtype)
        assert_close(y, expected(q, k, v, position), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", RTOL)
def test_on_a_gpu(rng, dtype):
    """Plain JAX, whatever kernels there are."""
    q, k, v = arrays(rng, 16, 4, 256, 64, dtype)
    with on("cuda"):
        attend = jax.jit(attention.one_token)
        assert ATTEND not in attend.lower(q, k, v, 0).as_text()
        for position in (0, 130, 255):
            wanted = expected(q, k, v, position)  # of products whose float32 may be rounded to TF32
            found = np.asarray(attend(q, k, v, position), np.float64)
            np.testing.assert_allclose(found, wanted, atol=1.5e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("window", [1, 5, 40, 1000])
def test_window(rng, has_kernel, window):
    q, k, v = arrays(rng, 6, 2, 64, 48)
    for position in (0, 4, 5, 39, 63):
        y = jax.jit(lambda *args: attention.one_token(*args, window=window))(q, k, v, position)
        assert_close(y, expected(q, k, v, position, window), jnp.float32)


def test_scale(rng, has_kernel):
    q, k, v = arrays(rng, 6, 2, 20, 48)
    for scale in (0, 0.3, -1):
        y = attention.one_token(q, k, v, 11, scale=scale)
        assert_close(y, expected(q, k, v, 11, scale=scale), jnp.float32)


def test_other_positions_do_not_matter(rng, has_kernel):
    """Whatever they hold; and a position beyond the cache sees all of it, one before it nothing."""
    q, k, v = arrays(rng, 6, 2, 20, 48)
    y = attention.one_token(q, k, v, 11, window=4)
    dirty = [jnp.full_like(a, jnp.nan).at[:, 8:12].set(a[:, 8:12]) for a in (k, v)]
    if has_kernel:  # of plain JAX zero times NaN is NaN, as everywhere
        np.testing.assert_array_equal(attention.one_token(q, *dirty, 11, window=4), y)
    np.testing.assert_array_equal(attention.one_token(q, k, v, 100), attention.one_token(q, k, v, 19))
    for position, window in ((-1, 0), (-(2**31), 3), (100, 4), (2**31 - 1, 4)):
        assert np.isnan(attention.one_token(q, k, v, position, window=window)).all()


def test_large_scores(rng, has_kernel):
    q, k, v = arrays(rng, 4, 2, 50, 64)
    for factor in (1e3, 1e6):
        assert_close(attention.one_token(q * factor, k, v, 49), expected(q * factor, k, v, 49), jnp.float32)
    assert np.isnan(attention.one_token(q.at[1, 3].set(jnp.nan), k, v, 49)[1]).all()


@pytest.mark.parametrize("dtype", RTOL)
def test_long(rng, on_cpu, dtype):
    """By several threads."""
    q, k, v = arrays(rng, 16, 8, 3000, 128, dtype)
    for position in (2999, 1700):
        assert_close(attention.one_token(q, k, v, position), expected(q, k, v, position), dtype)


def test_vmap(rng, has_kernel):
    q, k, v = arrays(rng, 6, 2, 64, 48, lead=(5, 3))
    positions = jnp.arange(15).reshape(5, 3) * 4
    y = jax.jit(jax.vmap(jax.vmap(attention.one_token)))(q, k, v, positions)
    for i in np.ndindex(5, 3):
        assert_close(y[i], expected(q[i], k[i], v[i], int(positions[i])), jnp.float32)
    shared = jax.vmap(attention.one_token, (0, None, None, None))(q[0], k[0, 0], v[0, 0], 30)
    for i in range(3):
        assert_close(shared[i], expected(q[0, i], k[0, 0], v[0, 0], 30), jnp.float32)


def test_grad(rng, has_kernel):
    q, k, v = arrays(rng, 4, 2, 9, 8)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention.one_token(q, k, v, 6, window=5)))

    check_grads(loss, (q, k, v), order=1, rtol=1e-2)
    gradients = jax.jit(jax.grad(loss, (1, 2)))(q, k, v)
    assert all((g[:, [0, 1, 7, 8]] == 0).all() and (g[:, 2:7] != 0).all() for g in gradients)


def test_scan_and_export(rng, on_cpu):
    from jaxgemv import EXPORT_CHECKS

    q, k, v = arrays(rng, 4, 2, 9, 8)

    @jax.jit
    def all_of(q, k, v):
        return jax.lax.scan(lambda _, i: (None, attention.one_token(q, k, v, i)), None, jnp.arange(9))[1]

    y = all_of(q, k, v)
    for i in range(9):
        assert_close(y[i], expected(q, k, v, i), jnp.float32)
    exported = jax.export.export(all_of, platforms=["cpu"], disabled_checks=EXPORT_CHECKS)(q, k, v)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(q, k, v), y)


def test_no_sequences(on_cpu):
    q, k, v = (jnp.zeros((0, *shape)) for shape in ((4, 8), (2, 9, 8), (2, 9, 8)))
    assert jax.vmap(attention.one_token)(q, k, v, jnp.zeros(0, int)).shape == (0, 4, 8)


F32, F16 = jnp.float32, jnp.float16


@pytest.mark.parametrize(
    ("shapes", "dtypes", "position", "rest", "error", "text"),
    [
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32, F16, F32), 0, {}, TypeError, "one dtype"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (int, int, int), 0, {}, TypeError, "one dtype"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0.5, {}, TypeError, "position must be an integer"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, [0], {}, ValueError, "position must have shape"),
        (((4, 8), (2, 9, 8), (2, 8, 8)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((4, 8), (2, 9, 7), (2, 9, 7)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((1, 4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((4, 8), (2, 0, 8), (2, 0, 8)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((5, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {}, ValueError, "multiple of kv_heads"),
        (((4, 8), (0, 9, 8), (0, 9, 8)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((4, 0), (2, 9, 0), (2, 9, 0)), (F32,) * 3, 0, {}, ValueError, "q must have shape"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {"window": -1}, ValueError, "window"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {"window": 2.5}, TypeError, "window must be an int"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {"scale": []}, TypeError, "scale must be a float"),
        (((4, 8), (2, 9, 8), (2, 9, 8)), (F32,) * 3, 0, {"scale": "a"}, TypeError, "scale must be a float"),
    ],
)
def test_errors(shapes, dtypes, position, rest, error, text):
    q, k, v = (jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(error, match=f"attention.one_token: .*{text}.*; got "):
        jax.jit(lambda q, k, v: attention.one_token(q, k, v, jnp.asarray(position), **rest))(q, k, v)


@pytest.mark.parametrize(
    "change",
    [
        {"q": ((3, 4, 8), F32)},
        {"k": ((2, 9, 7), F32)},
        {"k": ((2, 9, 8), F16)},
        {"v": ((2, 8, 8), F32)},
        {"position": ((), jnp.float32)},
        {"position": ((2,), jnp.int32)},
        {"k": ((3, 9, 8), F32), "v": ((3, 9, 8), F32)},
        {"k": ((0, 9, 8), F32), "v": ((0, 9, 8), F32)},
        {"k": ((2, 0, 8), F32), "v": ((2, 0, 8), F32)},
        {"y": ((4, 7), F32)},
        {"y": ((4, 8), F16)},
        {"window": -1},
    ],
)
def test_calls_made_by_hand(change):
    """What the function would never ask for is refused, and nothing beyond an array is read."""
    if backends["cpu"].missing:
        pytest.skip("no CPU kernels")
    given = {"q": ((4, 8), F32), "k": ((2, 9, 8), F32), "v": ((2, 9, 8), F32), "position": ((), jnp.int32)}
    given |= {"y": ((4, 8), F32), "window": 0} | change
    y, window = jax.ShapeDtypeStruct(*given.pop("y")), np.int64(given.pop("window"))
    with on("cpu"):
        call = jax.ffi.ffi_call(ATTEND, y)
        arrays = [jnp.zeros(*each) for each in given.values()]
        with pytest.raises(Exception, match="jaxgemv: attention: "):
            jax.block_until_ready(call(*arrays, window=window, scale=np.float32(1)))
