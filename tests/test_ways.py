"""Which way a call is lowered, for a platform with two kernels that do not exist."""

import jax
import jax.numpy as jnp
import pytest

from jaxgemv._ffi import Backend, Kernel, WeightLimits, backends
from jaxgemv._operands import Operands, Static
from jaxgemv._ways import Way, way

N, K = 48, 256
KERNELS = tuple(
    Kernel("none", "affine", 4, x, 8, frozenset({"zero", "bias", "activation", "index"}), False)
    for x in ("float16", "float32")
)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    def limits(_major, _one_byte, n, *_):
        return WeightLimits(loop_rows=3 * (n < N))

    made = Backend(KERNELS, most_rows=32, epilogue_rows=2, weight_limits=limits)
    monkeypatch.setitem(backends, "cpu", made)


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def call(rows=1, x="float32", n=N, stack=None, **more) -> tuple[Operands, Static]:
    """more: operands, and what else Static has."""
    lead = () if stack is None else (stack,)
    o = Operands(
        x=spec(rows, K, dtype=x),
        packed=spec(*lead, n, K // 8, dtype="uint32"),
        scale=spec(*lead, n),
        index=None if stack is None else spec(dtype="int32"),
    )
    operands = {name: a for name, a in more.items() if name in Operands._fields}
    s = Static("gemv", 4, None, jnp.dtype("float32"))
    return o._replace(**operands), s._replace(
        **{name: value for name, value in more.items() if name not in operands}
    )


def way_of(platform="cpu", obstacle=None, partitioned=False, **given) -> Way:
    return way(platform, obstacle, partitioned, *call(**given))


def test_product():
    assert way_of() is Way.KERNEL
    assert way_of(rows=32) is Way.KERNEL
    assert way_of(n=8, rows=3) is Way.LOOP
    assert way_of(n=8, rows=4) is Way.KERNEL
    assert way_of(rows=33) is Way.REFERENCE
    assert way_of(rows=65) is Way.MANY_ROWS
    assert way_of(stack=3) is Way.KERNEL
    assert way_of(stack=0) is way_of(stack=0, rows=65) is Way.REFERENCE


def test_without_kernels():
    for given in ({"platform": None}, {"obstacle": "something"}, {"implementation": "xla"}):
        assert way_of(**given) is Way.REFERENCE
        assert way_of(**given, rows=65) is Way.MANY_ROWS
    assert way_of(implementation="reference", rows=65) is Way.REFERENCE
    with pytest.raises(NotImplementedError, match="implementation='cpu' cannot run: something"):
        way_of(obstacle="something", implementation="cpu")


def test_parts():
    """Inside of a kernel that takes them, where that is faster; a global scale alone in the weight of many rows."""
    assert way_of(rows=2, activation="silu") is Way.KERNEL
    assert way_of(rows=3, activation="silu") is Way.PARTS_AROUND
    assert way_of(norm=spec(K)) is Way.PARTS_AROUND
    assert way_of(stack=0, activation="silu") is Way.PARTS_AROUND
    assert way_of(platform=None, activation="silu") is Way.PARTS_AROUND
    assert way_of(global_scale=spec()) is Way.PARTS_AROUND
    assert way_of(rows=65, global_scale=spec()) is Way.MANY_ROWS
    assert way_of(rows=65, global_scale=spec(), activation="silu") is Way.PARTS_AROUND


def test_other_types_of_x():
    """x gets its type before the product is partitioned."""
    assert way_of(x="int8") is way_of(x="int8", partitioned=True) is Way.FLOAT_X
    assert way_of(x="int8", platform=None) is Way.REFERENCE
    widened = {"dtype_before_widening": jnp.dtype("float16"), "activation": "silu", "rows": 3}
    assert way_of(**widened) is way_of(**widened, platform=None) is Way.NARROW_X


def test_several_devices():
    """The parts go around what is cut."""
    for rows in (1, 33, 65):
        assert way_of(partitioned=True, rows=rows) is Way.PARTITIONED
    assert way_of(partitioned=True, platform=None) is Way.PARTITIONED
    assert way_of(partitioned=True, stack=0) is Way.PARTITIONED
    assert way_of(partitioned=True, activation="silu") is Way.PARTS_AROUND
    assert way_of(partitioned=True, rows=65, global_scale=spec()) is Way.PARTS_AROUND
