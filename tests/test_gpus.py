"""Sharded programs on all the GPUs there are, two or more: right, and with the collectives that they have elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import Case, make
from sharded import (
    CASE,
    GRADIENTS,
    LAYOUTS,
    STACKS,
    collectives,
    kernel_calls,
    laid_out,
    mesh_of,
    moved_codes,
    put,
    put_weight,
    stack,
)

from jaxgemv import gemv

pytestmark = pytest.mark.cuda

# One axis: an all-reduce over another, of size 1, is none.
OF_ONE_AXIS = [name for name, layout in LAYOUTS.items() if "data" not in str(layout)]


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def mesh(request):
    count = jax.device_count("cuda")
    if count < 2:
        pytest.skip("one GPU")
    return mesh_of(request.param, (1, count), platform="cuda")


@pytest.mark.parametrize("layout", OF_ONE_AXIS)
def test_layouts(mesh, layout, rng):
    """A product and its gradient, each one kernel on each GPU, on weights that stay where they are."""
    p, args = laid_out(layout, 4, mesh, rng)
    f = jax.jit(lambda x, w, b: gemv(x, w, bias=b, implementation="cuda"))
    np.testing.assert_array_equal(f(*args), p.answer())
    compiled = f.lower(*args).compile()
    assert collectives(compiled) == LAYOUTS[layout][3]
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []

    x, w, _ = args
    ct = put(rng.integers(-2, 3, (4, 16)).astype(np.float32), mesh, *LAYOUTS[layout][2])
    g = jax.jit(lambda x, w, ct: jax.vjp(lambda x: gemv(x, w, implementation="cuda"), x)[1](ct)[0])
    np.testing.assert_array_equal(g(x, w, ct), np.asarray(ct) @ p.weight())
    compiled = g.lower(x, w, ct).compile()
    # With an Explicit axis it lies as x does: XLA may scatter where it reduces, or gather what is cut.
    sums = collectives(compiled).keys() & {"all-reduce", "reduce-scatter"}
    assert len(sums) == len(GRADIENTS[layout])
    assert kernel_calls(compiled) == 1
    assert moved_codes(compiled) == []


@pytest.mark.parametrize("x", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_mlp(mesh, rows, x, rng):
    """Columns, then rows, by the fast kernels: one all-reduce, of what leaves."""
    up = make(rng, 4, x, Case(rows, 2048, 512, 128, "zero", bias=True), exact=True)
    down = make(rng, 8, x, Case(rows, 512, 2048, 128, "zero"), exact=True)

    @jax.jit
    def mlp(x, up, down, bias):
        hidden = jnp.clip(gemv(x, up, bias=bias, implementation="cuda"), -1, 1)
        return gemv(hidden, down, out_dtype=jnp.float32, implementation="cuda")

    args = (
        put(up.x, mesh, None),
        put_weight(up.tensor, mesh, "model", None),
        put_weight(down.tensor, mesh, None, "model"),
        put(up.bias, mesh, "model"),
    )
    expected = np.clip(up.answer(), -1, 1) @ down.weight().T
    np.testing.assert_array_equal(mlp(*args), expected)
    compiled = mlp.lower(*args).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    assert kernel_calls(compiled) == 2
    assert moved_codes(compiled) == []

    inside = jax.shard_map(
        lambda x, up, down, bias: jax.lax.psum(mlp(x, up, down, bias), "model"),
        mesh=mesh,
        in_specs=(P(), P("model"), P(None, "model"), P("model")),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(inside)(*args), expected)


@pytest.mark.parametrize("w_spec", STACKS, ids=str)
def test_index(mesh, w_spec, rng):
    problems = [make(rng, 4, "float32", CASE, exact=True) for _ in range(4)]
    index = np.array([3, 0, -1, 1], np.int32)
    expected = np.full((4, 16), np.nan)
    for row, i in enumerate(index):
        if i >= 0:
            expected[row] = problems[0].x[row] @ problems[i].weight().T
    args = put(problems[0].x, mesh, None), put_weight(stack(problems), mesh, *w_spec), put(index, mesh, None)
    f = jax.jit(lambda x, w, i: gemv(x, w, index=i, implementation="cuda"))
    np.testing.assert_array_equal(f(*args), expected)
    assert moved_codes(f.lower(*args).compile()) == []
