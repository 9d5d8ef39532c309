"""`jaxgemv.flax.nnx.quantize_model` of weights that lie on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nnx_block import ROUNDING, Block, D, F, nnx
from sharded import mesh_of
from tolerance import assert_equal

from jaxgemv.flax.nnx import quantize_model


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_stays_sharded(on_cpu, kind, rng):
    mesh = mesh_of(kind)
    model = nnx.jit(lambda: Block(nnx.Rngs(0)))()
    x = jnp.asarray(rng.standard_normal((2, D)), jnp.float32)
    expected = quantize_model(model, **ROUNDING)
    specs = {"q": P(None, "model"), "o": P("model"), "up": P("data", "model"), "down": P(None, "model")}
    for name, spec in specs.items():
        layer = getattr(model, name)
        layer.kernel = nnx.Param(jax.device_put(layer.kernel[...], NamedSharding(mesh, spec)))
    new = quantize_model(model, **ROUNDING)
    cut = {
        "q": P("model"),
        "o": P(),
        "up": P("model", "data"),
        "down": P("model"),
    }  # K = 64 has 2 whole groups
    for name, spec in cut.items():
        layer = getattr(new, name)
        assert layer.packed[...].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), name
        assert_equal(np.asarray(layer.packed[...]), np.asarray(getattr(expected, name).packed[...]))
    if kind == AxisType.Auto:
        with jax.set_mesh(mesh):
            y = nnx.jit(lambda layer, x: layer(x))(new.up, jax.device_put(x, NamedSharding(mesh, P())))
        np.testing.assert_allclose(y, expected.up(x), atol=2e-5 * np.abs(y).max())


def test_axis_names_on_a_mesh(on_cpu):
    """Flax places what has axis names; where K cannot be cut as they say, its name goes."""
    mesh = mesh_of(AxisType.Auto)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
    with jax.set_mesh(mesh):
        linear = nnx.Linear(D, F, kernel_init=init, rngs=nnx.Rngs(0))
        linear.kernel = linear.kernel.replace(
            jax.device_put(linear.kernel[...], NamedSharding(mesh, P("data", "model")))
        )
        new = quantize_model(linear, **ROUNDING | {"group_size": D})
        again = nnx.merge(*nnx.split(new))
    for array, expected in (("packed", ("model", "data")), ("scale", ("model", None))):
        variable = getattr(again, array)
        metadata = variable.get_metadata()
        assert tuple(metadata.get("out_sharding") or metadata.get("sharding_names")) == expected
        assert variable[...].sharding.is_equivalent_to(NamedSharding(mesh, P(*expected)), 2)
