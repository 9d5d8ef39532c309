"""`jaxgemv.flax.linen.quantize_variables`: trained variables of `nn.Dense` for the same model of `QuantDense`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of
from tolerance import assert_equal

from jaxgemv import quantize
from jaxgemv.flax.linen import QuantDense, quantize_variables

K, N = 64, 96
ROUNDING = {"bits": 8, "group_size": 32, "method": "minmax"}


class Mlp(nn.Module):
    dense: type = nn.Dense
    options: tuple = ()

    @nn.compact
    def __call__(self, x):
        options = dict(self.options)
        names = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        y = self.dense(N, name="up", kernel_init=names, **options)(nn.LayerNorm()(x))
        y = nn.Conv(N, (3,))(nn.gelu(y))
        return self.dense(K, name="down", use_bias=False, **options)(y)


class Layers(nn.Module):
    dense: type = nn.Dense
    options: tuple = ()

    @nn.compact
    def __call__(self, x, _):
        return x + self.dense(K, name="dense", **dict(self.options))(x), None


def scanned(*arguments):
    axes = {"variable_axes": {"params": 0, "quant": 0}, "split_rngs": {"params": True}}
    return nn.scan(Layers, **axes, length=3)(*arguments)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 5, K)), jnp.float32)


@pytest.mark.parametrize("boxed", [True, False])
def test_model(x, boxed):
    variables = Mlp().init(jax.random.key(0), x)
    variables = (variables if boxed else nn.meta.unbox(variables)) | {"stats": {"mean": jnp.ones(3)}}
    found = []
    new = quantize_variables(variables, report=found.append, **ROUNDING)
    assert set(new) == {"params", "quant", "stats"}
    assert set(new["params"]) == {"LayerNorm_0", "Conv_0", "up"}  # what is left: a bias
    assert set(new["quant"]) == {"up", "down"}
    quant = Mlp(QuantDense, tuple(ROUNDING.items()))
    structure = jax.tree.map(jnp.shape, nn.meta.unbox(quant.init(jax.random.key(0), x)["quant"]))
    assert jax.tree.map(jnp.shape, nn.meta.unbox(new["quant"])) == structure

    plain = nn.meta.unbox(variables["params"])
    w = {name: quantize(plain[name]["kernel"], in_axis=0, **ROUNDING) for name in ("up", "down")}
    floats = plain | {name: plain[name] | {"kernel": w[name].dequantize().T} for name in w}
    with jax.default_matmul_precision("highest"):
        expected = Mlp().apply({"params": floats}, x)
    np.testing.assert_allclose(quant.apply(new, x), expected, atol=2e-5 * np.abs(expected).max())

    records = {r.path: r for r in found}
    assert (records["up/kernel"].what, records["up/kernel"].why) == ("8 bits, 96x64", "ends in kernel")
    assert (records["Conv_0/kernel"].what, records["Conv_0/kernel"].why) == ("kept", "has 3 dimensions")
    assert records["up/bias"].why == "has 1 dimension"
    if boxed:
        assert new["quant"]["up"]["kernel"]["scale"].names == ("mlp", "embed")


def test_stack(x):
    """Of nn.scan, by a predicate, whose arguments count."""
    variables = scanned().init(jax.random.key(0), x, None)
    assert not quantize_variables(variables, report=lambda record: None)["quant"]

    def predicate(path, array):
        return {"group_size": 16} if path.endswith("kernel") else False

    new = quantize_variables(variables, predicate=predicate, bits=3)
    y, _ = scanned(QuantDense, (("bits", 3), ("group_size", 16))).apply(new, x, None)
    kernels = variables["params"]["dense"]["kernel"]
    expected = x
    for kernel in kernels:
        w = quantize(kernel, in_axis=0, bits=3, group_size=16).dequantize()
        expected = expected + jnp.einsum("btk,nk->btn", expected, w, precision="highest")
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_a_predicate_is_asked_of_kernels(x):
    """An embedding has no layer of ours that would find it."""
    names = []
    tree = {"params": {"embed": {"embedding": jnp.ones((8, 32))}, "up": {"kernel": jnp.ones((32, 8))}}}
    new = quantize_variables(tree, predicate=lambda path, array: names.append(path) or True)
    assert names == ["up/kernel"] == ["/".join((*new["quant"], *new["quant"]["up"]))]
    assert new["params"] == {"embed": tree["params"]["embed"]}


def test_shapes(x):
    """Of a model that is not there, to restore one into."""
    model = nn.Dense(64)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    expected = jax.eval_shape(lambda: quantize_variables(model.init(jax.random.key(0), x), bits=4))
    assert quantize_variables(shapes, bits=4) == expected


def test_donate(x):
    variables = nn.meta.unbox(Mlp().init(jax.random.key(0), x))
    kernels = [variables["params"][name]["kernel"] for name in ("down", "up")]
    alive = []
    new = quantize_variables(
        variables,
        donate=True,
        report=lambda r: alive.append(sum(not k.is_deleted() for k in kernels)),
        **ROUNDING,
    )
    assert sorted(set(alive)) == [0, 1, 2]
    assert not new["params"]["Conv_0"]["kernel"].is_deleted()


def test_sharded_stays_sharded(on_cpu, x):
    mesh = mesh_of(AxisType.Auto)
    variables = nn.meta.unbox(Mlp().init(jax.random.key(0), x))
    variables["params"]["up"]["kernel"] = jax.device_put(
        variables["params"]["up"]["kernel"], NamedSharding(mesh, P("data", "model"))
    )
    packed = quantize_variables(variables, **ROUNDING)["quant"]["up"]["kernel"]["packed"]
    assert packed.sharding.is_equivalent_to(NamedSharding(mesh, P("model", "data")), 2)


def test_more_layers(x):
    """What is quantised already stays."""
    variables = nn.meta.unbox(Mlp().init(jax.random.key(0), x))
    once = quantize_variables(variables, predicate=lambda path, array: path == "up/kernel", **ROUNDING)
    assert set(once["quant"]) == {"up"}
    assert_equal(quantize_variables(once, **ROUNDING), quantize_variables(variables, **ROUNDING))


def test_nothing_to_quantise(x):
    """A warning, unless there are no matrices, or something else says so."""
    variables = nn.meta.unbox(scanned().init(jax.random.key(0), x, None))
    with pytest.warns(UserWarning, match="nothing is quantised: 'dense/kernel' has 3 dimensions"):
        assert quantize_variables(variables)["quant"] == {}
    quantize_variables(variables, report=lambda record: None)
    quantize_variables({"params": {"bias": jnp.ones(3)}})
    quantize_variables(quantize_variables(nn.meta.unbox(nn.Dense(4).init(jax.random.key(0), x))))


def test_errors(x):
    variables = nn.meta.unbox(Mlp().init(jax.random.key(0), x))
    with pytest.raises(ValueError, match="variables must have a collection params; got up"):
        quantize_variables({"up": {}})
    with pytest.raises(TypeError, match=r"quantize_variables: arguments must be .*; got groupsize"):
        quantize_variables(variables, groupsize=3)
    with pytest.raises(
        ValueError, match="quantize_variables: down/kernel: quantize: bits must be an integer"
    ):
        quantize_variables(variables, bits=9, predicate=lambda path, array: path == "down/kernel")
