"""Compiled programs of sharded products, for 8 CPU devices and for 8 H200s that need not be there.

What no result shows: that weights stay where they are, that nothing is sent but what must be, that each device runs one
kernel for each product, and that no copy of the weights, packed or not, is made on the way.
"""

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import PARTIAL_GATHERS, collectives, kernel_calls, moved_codes

from jaxgemv import QuantizedTensor, gemv

N, K, EXPERTS = 4096, 4096, 8
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
REDUCE = {"all-reduce": 1}


@pytest.fixture(params=["cpu", "h200"])
def target(request):
    """Devices to compile for, and the compiler's options."""
    if request.param == "cpu":
        return jax.devices("cpu"), {}
    return h200.devices(), h200.COMPILER_OPTIONS


class Program:
    """A program over a mesh, its operands given by shape and sharding."""

    def __init__(self, target, kind):
        self.devices, self.options = target
        self.mesh = Mesh(np.array(self.devices[:8]).reshape(2, 4), ("data", "model"), axis_types=(kind,) * 2)

    def array(self, shape, *spec, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(self.mesh, P(*spec)))

    def weight(self, *spec, n=N, k=K, stack=()):
        parameter = self.array((*stack, n, k // 128), *spec)
        return QuantizedTensor(
            packed=self.array((*stack, n, k // 8), *spec, dtype="uint32"),
            scale=parameter,
            zero=parameter,
            bits=4,
        )

    def compiled(self, f, *args):
        with jax.set_mesh(self.mesh):
            return jax.jit(f).lower(*args).compile(compiler_options=self.options)


def check(compiled, calls, expected, held, moved=True):
    """held: bytes of codes on one device. Temporaries (x in other orders) are less, a dequantised weight 4 times it."""
    assert kernel_calls(compiled) == calls
    assert collectives(compiled) == expected
    assert compiled.memory_analysis().temp_size_in_bytes < held / 3
    if moved:
        assert moved_codes(compiled) == []


@KINDS
@pytest.mark.parametrize(
    ("x", "w", "expected"),
    [
        ((None, None), ("model", None), {}),
        (("data", None), ("model", None), {}),
        ((None, "model"), (None, "model"), REDUCE),
        (("data", "model"), (None, "model"), REDUCE),
        ((None, "model"), ("data", "model"), REDUCE),
        ((None, None), (None, ("data", "model")), REDUCE),
        ((None, None), (("data", "model"), None), {}),
    ],
    ids=str,
)
def test_gemv(target, kind, x, w, expected):
    program = Program(target, kind)
    args = program.array((4, K), *x), program.weight(*w), program.array((N,), w[0])
    compiled = program.compiled(lambda x, w, b: gemv(x, w, bias=b), *args)
    check(compiled, 1, expected, N * K / 2 / 8)


def test_what_the_checks_would_see(target):
    """A weight that is gathered, and one that is copied."""
    program = Program(target, AxisType.Auto)
    whole = NamedSharding(program.mesh, P())
    x, w = program.array((4, K)), program.weight("model", None)
    gathered = program.compiled(lambda x, w: gemv(x, jax.lax.with_sharding_constraint(w, whole)), x, w)
    assert set(collectives(gathered)) == {"all-gather"}
    assert moved_codes(gathered)
    assert gathered.memory_analysis().temp_size_in_bytes >= N * K / 2
    copied = program.compiled(lambda x, w: gemv(x, jax.tree.map(lambda a: a[::-1], w)), x, program.weight())
    assert moved_codes(copied)


@KINDS
def test_mlp(target, kind):
    """Columns then rows, as each block of a tensor-parallel transformer: one all-reduce."""
    program = Program(target, kind)
    up, down = program.weight("model", None), program.weight(None, "model", n=K, k=N)
    compiled = program.compiled(
        lambda x, up, down: x + gemv(jax.nn.silu(gemv(x, up)), down), program.array((4, K), "data"), up, down
    )
    check(compiled, 2, REDUCE, N * K / 2 / 4)


@KINDS
@pytest.mark.parametrize(
    ("w", "expected"),
    [((None, "model", None), {}), ((None, None, "model"), REDUCE), (("model", None, None), REDUCE)],
    ids=str,
)
@pytest.mark.parametrize("rows", [4, 64])
def test_experts(target, kind, w, expected, rows):
    """By index, of a stack that may be sharded itself; few rows, and so many that those of an expert share a read."""
    program = Program(target, kind)
    stack = program.weight(*w, stack=(EXPERTS,))
    index = program.array((rows,), dtype="int32")
    compiled = program.compiled(lambda x, w, i: gemv(x, w, index=i), program.array((rows, K)), stack, index)
    check(compiled, 1, expected, EXPERTS * N * K / 2 / 4)


@KINDS
def test_layers(target, kind):
    """A decoder's loop over stacked layers by index: no layer is copied, on any version."""
    program = Program(target, kind)
    up = program.weight(None, "model", None, stack=(EXPERTS,))
    down = program.weight(None, None, "model", n=K, k=N, stack=(EXPERTS,))

    def layers(x, up, down):
        return jax.lax.fori_loop(0, EXPERTS, lambda i, x: gemv(gemv(x, up, index=i), down, index=i), x)

    compiled = program.compiled(layers, program.array((1, K)), up, down)
    check(compiled, 2, REDUCE, N * K / 2 / 4)


@KINDS
def test_scan(target, kind):
    """XLA hands kernels a layer where it lies in the stack, from jax 0.11.2 on and on GPUs."""
    if target[1] != h200.COMPILER_OPTIONS or jax.__version_info__ < (0, 11, 2):
        pytest.skip("XLA copies each layer here; test_layers shows the way around it")
    program = Program(target, kind)
    up = program.weight(None, "model", None, stack=(EXPERTS,))
    down = program.weight(None, None, "model", n=K, k=N, stack=(EXPERTS,))

    def layers(x, up, down):
        return jax.lax.scan(lambda x, w: (gemv(gemv(x, w[0]), w[1]), None), x, (up, down))[0]

    compiled = program.compiled(layers, program.array((8, K)), up, down)
    check(compiled, 2, REDUCE, N * K / 2 / 4, moved=False)


@KINDS
@pytest.mark.parametrize(("w", "expected"), [(("model", None), {}), ((None, "model"), REDUCE)], ids=str)
def test_vmap(target, kind, w, expected):
    """Over a batch that is sharded: one kernel for all of a device's rows."""
    program = Program(target, kind)
    if kind == AxisType.Explicit and PARTIAL_GATHERS:
        pytest.skip("this jax gathers the operands of a vmapped shard_map")
    compiled = program.compiled(
        jax.vmap(gemv, (0, None)), program.array((4, 2, K), "data"), program.weight(*w)
    )
    check(compiled, 1, expected, N * K / 2 / 4)


@KINDS
def test_shard_map(target, kind):
    """Over all axes, and over one with the other left to gemv."""
    program = Program(target, kind)
    x, w = program.array((4, K), "data"), program.weight("model", None)

    def over(axes, *specs):
        return jax.shard_map(
            gemv, mesh=program.mesh, in_specs=specs[:2], out_specs=specs[2], axis_names=set(axes)
        )

    compiled = program.compiled(over(("data", "model"), P("data"), P("model"), P("data", "model")), x, w)
    check(compiled, 1, {}, N * K / 2 / 4)
    if kind == AxisType.Auto or not PARTIAL_GATHERS:
        compiled = program.compiled(over(("data",), P("data"), P(), P("data")), x, w)
        check(compiled, 1, {}, N * K / 2 / 4)


@KINDS
@pytest.mark.parametrize(
    ("w", "expected"),
    [(("model", None), REDUCE), ((None, "model"), {}), (("data", "model"), REDUCE)],
    ids=str,
)
def test_gradient(target, kind, w, expected):
    """Of x: what the product sums this scatters, and the other way round. The weight is read as it lies."""
    program = Program(target, kind)
    ct = program.array((4, N), None, w[0])
    compiled = program.compiled(
        lambda x, w, ct: jax.vjp(lambda x: gemv(x, w), x)[1](ct)[0],
        program.array((4, K), None, w[1]),
        program.weight(*w),
        ct,
    )
    check(compiled, 1, expected, N * K / 2 / 8)


@KINDS
def test_gradient_through_mlp(target, kind):
    """There and back: each weight is read once each way, and each way sums once."""
    program = Program(target, kind)
    up, down = program.weight("model", None), program.weight(None, "model", n=K, k=N)

    def loss(x, up, down):
        return jnp.sum(jnp.tanh(gemv(jax.nn.silu(gemv(x, up)), down).astype(jnp.float32)))

    compiled = program.compiled(jax.value_and_grad(loss), program.array((4, K)), up, down)
    check(compiled, 4, {"all-reduce": 2}, N * K / 2 / 4)
