"""Many slices of few experts: those of one expert share a read of its weights, and nobody can tell from the result."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels import compiled
from problems import Case, make
from sharded import collectives, kernel_calls, mesh_of, moved_codes, put, put_weight, spec_of
from test_kernels import telling
from test_lowering import calls, lowered, spec, with_kernels

import jaxgemv
from jaxgemv import QuantizedTensor, gemv
from jaxgemv import _grouped as grouped

BATCH, STACK = 48, 3
IDS = {
    "random": lambda rng: rng.integers(0, STACK, BATCH),
    "all the same": lambda rng: np.full(BATCH, 1),
    "in turn": lambda rng: np.arange(BATCH) % STACK,
    "sorted": lambda rng: np.sort(rng.integers(0, STACK, BATCH)),
    "one of its own": lambda rng: np.where(np.arange(BATCH) == 17, 0, 2),
    "some out of range": lambda rng: rng.choice([0, 1, 2, -1, STACK, 2**31 - 1, -(2**31)], BATCH),
    "all out of range": lambda rng: rng.choice([-5, STACK, STACK + 1], BATCH),
    "distinct, mostly out of range": lambda rng: np.arange(BATCH) - 20,
}


@pytest.fixture
def case(backend):
    """Large enough to be worth it."""
    n, k = (1024, 4096) if backend == "cuda" else (128, 1024)
    return Case(BATCH, n, k, 128, "zero", bias=True)


@pytest.fixture
def stack(case, rng):
    problems = [make(rng, 4, "float32", case, exact=True) for _ in range(STACK)]
    w = jax.tree.map(lambda *a: jnp.stack(a), *(p.tensor for p in problems))
    return problems, w, jnp.stack([p.bias for p in problems])


def expected(problems, x, ids):
    """(B, ..., N), NaN where no expert has the number."""
    y = np.full((*x.shape[:-1], len(problems[0].packed)), np.nan)
    for number, p in enumerate(problems):
        y[ids == number] = x[ids == number] @ p.weight().T + (0 if p.bias is None else p.bias)
    return y


def tiles_of(f, *args) -> list[str]:
    """x as it goes to the kernel."""
    return [line.rpartition(": (tensor<")[2].partition("x")[0] for line in calls(lowered("cpu", f, *args))]


@pytest.mark.parametrize(("x", "rows"), [("bfloat16", ()), ("float32", (1,)), ("float16", (2,))])
def test_ids(backend, stack, x, rows, rng):
    """Results in float32, as x was before it was cut to 16 bits: all is exact."""
    problems, w, biases = stack
    values = rng.integers(-2, 3, (BATCH, *rows, problems[0].k)).astype(jnp.dtype(x))
    w = jax.tree.map(lambda a: a if a.dtype == np.uint32 else a.astype(x), w)

    @jax.jit
    def f(x, ids):
        return gemv(x, w, index=ids, bias=biases, out_dtype="float32", implementation=backend)

    for name, make_ids in IDS.items():
        ids = make_ids(rng).astype(np.int32)
        if backend == "cpu":
            assert tiles_of(f, values, ids) == [str((BATCH + 31 * STACK) // 32)]  # of 32 slices
        with telling(name):
            np.testing.assert_array_equal(f(values, ids), expected(problems, values.astype(np.float64), ids))


def test_nan_stays_in_its_row(backend, stack, rng):
    """Rows in a tile are strangers to each other."""
    problems, w, _ = stack
    x, ids = problems[0].x.copy(), rng.integers(0, STACK, BATCH).astype(np.int32)
    good = gemv(x, w, index=ids, implementation=backend)
    x[5, 7] = np.nan
    y = gemv(x, w, index=ids, implementation=backend)
    assert np.isnan(y[5]).all()
    np.testing.assert_array_equal(np.delete(y, 5, 0), np.delete(good, 5, 0))


def test_gradients(backend, stack, rng):
    problems, w, biases = stack
    ids = IDS["some out of range"](rng).astype(np.int32)
    valid = (ids >= 0) & (ids < STACK)

    def loss(x, scale, biases):
        stack = QuantizedTensor(packed=w.packed, scale=scale, zero=w.zero, bits=4)
        y = gemv(x, stack, index=ids, bias=biases, implementation=backend)
        return jnp.where(valid[:, None], y, 0).sum()

    x = jnp.asarray(problems[0].x)
    dx, dscale, dbias = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w.scale, biases)
    groups = (STACK, -1, x.shape[-1] // 128, 128)
    codes = np.stack([p.weight() for p in problems]).reshape(groups) / np.asarray(w.scale)[..., None]
    of_expert = np.stack([np.asarray(x)[ids == e].sum(0) for e in range(STACK)]).reshape(STACK, 1, -1, 128)
    np.testing.assert_array_equal(dscale, (codes * of_expert).sum(-1))
    np.testing.assert_array_equal(dbias, np.bincount(ids[valid])[:, None] * np.ones_like(biases))
    np.testing.assert_array_equal(dx[valid], [problems[e].weight().sum(0) for e in ids[valid]])


@compiled
@pytest.mark.parametrize("axes", [(None, 0), (1, 1), (0, None)], ids=str)
def test_vmap(backend, stack, axes, rng):
    """Over ids, over x, over both: the entries of a batch are routed together."""
    problems, w, biases = stack
    ids = rng.integers(-1, STACK + 1, (2, BATCH)).astype(np.int32)
    x = rng.integers(-2, 3, (2, BATCH, problems[0].k)).astype(np.float32)
    f = jax.jit(jax.vmap(lambda x, ids: gemv(x, w, index=ids, bias=biases, implementation=backend), axes))
    at = [np.moveaxis(a, 0, axis) if axis else a if axis == 0 else a[0] for a, axis in zip((x, ids), axes)]
    y = f(*at)
    for i in range(2):
        of = (x[i if axes[0] is not None else 0], ids[i if axes[1] is not None else 0])
        np.testing.assert_array_equal(y[i], expected(problems, *of))


def test_symbolic_batch(stack, rng):
    """How many there are is not known, so each is on its own."""
    problems, w, biases = stack
    (b,) = jax.export.symbolic_shape("b")
    f = jax.jit(lambda x, ids: gemv(x, w, index=ids, bias=biases))
    k = problems[0].k
    specs = jax.ShapeDtypeStruct((b, k), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        exported = jax.export.export(f, platforms=("cpu",), disabled_checks=jaxgemv.EXPORT_CHECKS)(*specs)
        for batch in (1, BATCH):
            ids = rng.integers(0, STACK + 1, batch).astype(np.int32)
            x = problems[0].x[:batch]
            np.testing.assert_array_equal(exported.call(x, ids), expected(problems, x, ids))


@pytest.mark.parametrize("w", [("model", None, None), (None, "model", None), (None, None, "model")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_sharded(kind, w, rng):
    """Each device sees to its own part; to its own experts, where the stack is cut."""
    problems = [make(rng, 4, "float32", Case(64, 256, 1024, 128, "zero"), exact=True) for _ in range(4)]
    mesh = mesh_of(kind)
    stack = put_weight(jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems)), mesh, *w)
    ids = rng.integers(-1, 5, 64).astype(np.int32)
    x = problems[0].x
    args = put(x, mesh), stack, put(ids, mesh)
    f = jax.jit(lambda x, w, ids: gemv(x, w, index=ids, implementation="cpu"))
    with jax.set_mesh(mesh):
        compiled = f.lower(*args).compile()
    y = compiled(*args)
    assert collectives(compiled) == ({} if w[1] else {"all-reduce": 1})
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []
    assert spec_of(y) == (None, w[1])
    np.testing.assert_array_equal(y, expected(problems, x, ids))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_shard_map(kind, rng):
    """Tokens and outputs cut by the user: each device routes its own tokens. And its gradient."""
    problems = [make(rng, 4, "float32", Case(96, 512, 1024, 128, "zero"), exact=True) for _ in range(3)]
    mesh = mesh_of(kind)
    w = put_weight(jax.tree.map(lambda *a: np.stack(a), *(p.tensor for p in problems)), mesh, None, "model")
    x, ids = problems[0].x, rng.integers(0, 3, 96).astype(np.int32)
    f = jax.shard_map(
        lambda x, w, ids: gemv(x, w, index=ids, implementation="cpu"),
        mesh=mesh,
        in_specs=(P("data"), P(None, "model"), P("data")),
        out_specs=P("data", "model"),
    )
    args = put(x, mesh, "data"), w, put(ids, mesh, "data")
    program = jax.jit(f).lower(*args)
    assert "tensor<4x32x1024xf32>" in program.as_text()
    np.testing.assert_array_equal(program.compile()(*args), expected(problems, x, ids))
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(lambda x, *rest: f(x, *rest).sum()))(*args)
    np.testing.assert_array_equal(grad, np.stack([problems[i].weight().sum(0) for i in ids]))


@with_kernels
def test_program(platform):
    """One call on tiles, on the stack as it lies there, and nothing of its size is made."""
    x, w, ids = (
        spec(64, 4096),
        QuantizedTensor(packed=spec(8, 4096, 512, dtype="uint32"), scale=spec(8, 4096, 32), bits=4),
        spec(64, dtype="int32"),
    )
    f = lambda x, w, ids: gemv(x, w, index=ids)  # noqa: E731
    (call,) = calls(lowered(platform, f, x, w, ids))
    assert "tensor<11x16x4096xbf16>" in call
    assert "tensor<8x4096x512xui32>" in call
    if platform == "cpu":
        compiled = jax.jit(f).lower(x, w, ids).compile()
        assert moved_codes(compiled) == []
        assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 512 * 4


BIG = {"nbytes": 8 << 20, "share": 16, "platform": "cuda"}


def test_when_it_pays():
    """Not for a few slices, nor for small matrices, nor where a slice fills a read by itself."""
    assert grouped.tile_size(32, 1, 8, **BIG) == 8
    assert grouped.tile_size(64, 1, 8, **BIG) == 16
    assert grouped.tile_size(512, 1, 8, **BIG) == 16
    assert grouped.tile_size(512, 4, 8, **BIG) == 4
    for batch, rows, stack in ((15, 1, 8), (8, 1, 8), (1, 1, 1), (32, 16, 8), (32, 9, 8)):
        assert grouped.tile_size(batch, rows, stack, **BIG) == 1
    assert grouped.tile_size(32, 1, 8, **BIG | {"nbytes": 1 << 20}) == 1
    assert grouped.tile_size(32, 1, 8, **BIG | {"nbytes": 1 << 20, "platform": "cpu", "share": 4}) == 4


@pytest.mark.parametrize("size", [2, 3, 4, 16])
@pytest.mark.parametrize("stack", [1, 3, 7])
def test_tiles_suffice(size, stack, rng):
    """The number of tiles is known while tracing; the worst routing fills them all and no more."""
    for batch in (2 * stack, 2 * stack + 1, 5 * stack + 3):
        most = 0
        for _ in range(50):
            counts = np.bincount(rng.integers(0, stack, batch) // rng.integers(1, stack + 1), minlength=stack)
            most = max(most, sum(-(-counts // size)))
        spread = np.full(stack, 1)
        spread[0] += batch - stack
        most = max(most, sum(-(-spread // size)))
        assert most <= grouped._tiles(batch, stack, size)
        assert grouped._tiles(batch, stack, size) < batch
