"""`jaxgemv.qwix.provider`: what each rule becomes, linen and nnx models, and what is refused."""

import importlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import assert_equal

from jaxgemv import gemv, quantize, quantize_activations

qwix = pytest.importorskip("qwix")
if not hasattr(nnx.Variable, "get_raw_value"):
    pytest.skip("Qwix needs a newer Flax", allow_module_level=True)
import jaxgemv.qwix  # noqa: E402

K, N = 64, 24


def rule(**fields):
    return qwix.QuantizationRule(**fields)


def quantised(model, *inputs, method="minmax", **fields):
    return qwix.quantize_model(model, jaxgemv.qwix.provider([rule(**fields)], method=method), *inputs)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 3, K)), jnp.float32)


@pytest.mark.parametrize(
    ("fields", "rounding"),
    [
        ({"weight_qtype": jnp.int4}, {"bits": 4, "group_size": None, "symmetric": True}),
        ({"weight_qtype": jnp.int8, "tile_size": 32}, {"bits": 8, "group_size": 32, "symmetric": True}),
        ({"weight_qtype": "int3", "tile_size": 0.25}, {"bits": 3, "group_size": 16, "symmetric": True}),
        (
            {"weight_qtype": "int2", "tile_size": 16, "weight_calibration_method": "minmax"},
            {"bits": 2, "group_size": 16},
        ),
        ({"weight_qtype": "nf4"}, {"format": "nf4"}),
        ({"weight_qtype": "nf4", "tile_size": 64}, {"format": "nf4"}),
        ({"weight_qtype": jnp.float8_e4m3fn}, {"format": "fp8"}),
        ({"weight_qtype": jnp.float8_e4m3fn, "tile_size": 32}, {"format": "fp8", "group_size": 32}),
        ({"weight_qtype": "mxfp4", "tile_size": 32}, {"format": "mxfp4"}),
        ({"weight_qtype": "nvfp4", "tile_size": 16}, {"format": "nvfp4"}),
        ({"weight_qtype": "mxfp8", "tile_size": 32}, {"format": "mxfp8"}),
    ],
    ids=str,
)
def test_rules(x, fields, rounding):
    """The layer's product is gemv with the weight that quantize makes, bit for bit."""
    linear = nnx.Linear(K, N, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
    new = quantised(linear, x, **fields)
    w = quantize(linear.kernel[...], in_axis=0, method="minmax", **rounding)
    assert new.kernel.shape == (K, N)
    assert_equal(new(x), gemv(x, w) + linear.bias[...])
    assert_equal(linear(x), nnx.Linear(K, N, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())(x))


def test_the_default_method(x):
    linear = nnx.Linear(K, N, use_bias=False, rngs=nnx.Rngs(0))
    provider = jaxgemv.qwix.provider([rule(weight_qtype="int3", tile_size=16)])
    new = qwix.quantize_model(linear, provider, x)
    w = quantize(linear.kernel[...], in_axis=0, bits=3, group_size=16, symmetric=True)
    assert_equal(new(x), gemv(x, w))


@pytest.mark.parametrize("tile", [None, 32])
def test_int8_activations(x, tile):
    linear = nnx.Linear(K, N, use_bias=False, rngs=nnx.Rngs(0))
    new = quantised(linear, x, weight_qtype=jnp.int4, act_qtype=jnp.int8, tile_size=tile)
    w = quantize(linear.kernel[...], in_axis=0, bits=4, group_size=tile, symmetric=True, method="minmax")
    codes, scale = quantize_activations(x, group_size=tile)
    assert_equal(new(x), gemv(codes, w, x_scale=scale))


class Mixed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(K, K, rngs=rngs)
        self.conv = nnx.Conv(K, K, (3,), rngs=rngs)
        self.heads = nnx.LinearGeneral(K, (4, 16), rngs=rngs)
        self.out = nnx.Einsum("btnh,nhd->btd", (4, 16, K), rngs=rngs)
        self.norm = nnx.Param(jnp.ones(K))
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (K, N)))

    def __call__(self, x):
        x = self.heads(self.conv(self.first(x))) * self.norm[...].reshape(4, 16)
        y = jnp.einsum("btnh,bsnh->bnts", x, x)  # of no weight
        x = self.out(jnp.einsum("bnts,bsnh->btnh", nnx.softmax(y), x))
        return jnp.dot(x, jnp.astype(self.w[...], x.dtype))


def test_what_is_quantised(x):
    """By module path; convolutions and products of activations are not; a float model with the weights agrees."""
    model = Mixed(nnx.Rngs(0))
    rules = [rule(module_path="first"), rule(weight_qtype=jnp.int8, tile_size=16)]
    new = qwix.quantize_model(model, jaxgemv.qwix.provider(rules, method="minmax"), x)
    kept = {name: type(getattr(new, name).kernel) for name in ("first", "conv")}
    assert set(kept.values()) == {nnx.Param}
    assert new.heads.kernel.shape == (K, 4, 16)
    assert new.out.kernel.shape == (4, 16, K)
    assert new.w.shape == (K, N)

    plain = nnx.clone(model)
    for layer in ("heads", "out"):
        getattr(plain, layer).kernel = nnx.Param(arrays(getattr(new, layer).kernel.array).dequantize())
    plain.w = nnx.Param(arrays(new.w.array).dequantize())
    with jax.default_matmul_precision("highest"):
        y, expected = new(x), plain(x)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())
    assert np.abs(y - model(x)).max() > 0
    again = nnx.jit(lambda model, x: model(x))(new, x)
    np.testing.assert_allclose(again, y, atol=2e-5 * np.abs(expected).max())
    grads = nnx.to_pure_dict(nnx.grad(lambda model: model(x).sum())(new))
    assert {"norm", "heads"} < set(grads)
    assert set(grads["heads"]) == {"bias"}


def arrays(kernel):
    """With arrays in the place of variables."""
    leaves, structure = jax.tree.flatten(kernel)
    return structure.unflatten(map(jnp.asarray, leaves))


def test_nnx_params(x):
    """Float parameters into an abstract quantised model."""
    model = Mixed(nnx.Rngs(0))
    fields = {"weight_qtype": jnp.int4, "tile_size": 16, "weight_calibration_method": "minmax"}
    new = quantised(model, x, **fields)
    abstract = nnx.eval_shape(lambda: quantised(Mixed(nnx.Rngs(1)), jnp.ones_like(x), **fields))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(abstract, jaxgemv.qwix.quantize_params(params, abstract))
    assert_equal(abstract(x), new(x))


class Transformer(nn.Module):
    """A linen model that knows nothing of us: attention, an MLP, a stack of layers, axis names."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(40, K)(ids)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        y = nn.Dense(96, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))(
            x
        )
        x = x + nn.Dense(K)(nn.gelu(y))
        stack = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack(name="layers")(x, None)
        return nn.DenseGeneral(40, dtype=jnp.float32)(x)


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(K, name="dense")(x), None


def test_linen(rng):
    """Logits are those of the float model with the same weights; init and quantize_params make the same."""
    model, ids, key = Transformer(), jnp.asarray(rng.integers(0, 40, (2, 5))), jax.random.key(0)
    params = nn.meta.unbox(model.init(key, ids))["params"]
    new = quantised(model, weight_qtype=jnp.int8, tile_size=16)
    made = new.init(key, ids)["params"]
    named = made["Dense_0"]["kernel"].array.tensor
    assert (named.packed.names, named.scale.names) == (("mlp", "embed"), ("mlp", "embed"))

    quant = jaxgemv.qwix.quantize_params(params, jax.eval_shape(new.init, key, ids)["params"])
    assert_equal(jax.tree.leaves(quant), jax.tree.leaves(nn.meta.unbox(made)))
    assert quant["layers"]["dense"]["kernel"].shape == (3, K, K)

    def is_weight(leaf):
        return hasattr(leaf, "how")

    floats = jax.tree.map(lambda w: w.array.dequantize() if is_weight(w) else w, quant, is_leaf=is_weight)
    assert jax.tree.map(jnp.shape, floats) == jax.tree.map(jnp.shape, params)
    with jax.default_matmul_precision("highest"):
        expected = model.apply({"params": floats}, ids)
    y = jax.jit(new.apply)({"params": quant}, ids)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())
    assert_equal(jax.jit(new.apply)({"params": made}, ids), y)
    # Four of the attention, two of the MLP, one in the scan, and the last.
    assert str(jax.make_jaxpr(new.apply)({"params": quant}, ids)).count("gemv[") == 8


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"weight_qtype": jnp.bfloat16},
            NotImplementedError,
            "weight_qtype must be int2 to int8, .*; got bfloat16",
        ),
        ({"weight_qtype": jnp.float8_e5m2}, NotImplementedError, "weight_qtype must be .*; got float8_e5m2"),
        ({"weight_qtype": "int9"}, NotImplementedError, "weight_qtype must be .*; got int9"),
        (
            {"weight_qtype": "int8", "act_qtype": "int4"},
            NotImplementedError,
            "act_qtype must be None or int8; got 'int4'",
        ),
        (
            {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True},
            NotImplementedError,
            "act_static_scale must be None or False for int8; got True",
        ),
        (
            {"weight_qtype": "int8", "weight_calibration_method": "rms,3"},
            NotImplementedError,
            "weight_calibration_method must be 'absmax' or 'minmax' for int8; got 'rms,3'",
        ),
        (
            {"weight_qtype": "nf4", "weight_calibration_method": "minmax"},
            NotImplementedError,
            "weight_calibration_method must be 'absmax' for nf4; got 'minmax'",
        ),
        (
            {"weight_qtype": "nf4", "tile_size": 32},
            ValueError,
            "group_size must be 64 for format='nf4'; got 32",
        ),
        ({"weight_qtype": "int4", "tile_size": 0}, ValueError, "group_size must be"),
    ],
)
def test_refused_rules(fields, error, message):
    """When the provider is made, before any model runs."""
    with pytest.raises(error, match=f"jaxgemv.qwix: {message}"):
        jaxgemv.qwix.provider([rule(**fields)])


def test_errors(rng, x):
    with pytest.raises(ValueError, match="method must be 'mse' or 'minmax'; got 'best'"):
        jaxgemv.qwix.provider([], method="best")
    with pytest.raises(TypeError, match=r"rules must be qwix\.QuantizationRules; got dict"):
        jaxgemv.qwix.provider([{"weight_qtype": "int4"}])
    model = nn.Dense(N)
    params, new = model.init(jax.random.key(0), x)["params"], quantised(model, weight_qtype="int4")
    with pytest.raises(ValueError, match=r"kernel must be quantised .*quantize_params.*; got floats"):
        new.apply({"params": params}, x)
    abstract = jax.eval_shape(new.init, jax.random.key(0), x)["params"]
    with pytest.raises(TypeError, match=r"call jaxgemv\.qwix\.quantize_params; got qwix\.quantize_params"):
        qwix.quantize_params(params, abstract)
    stock = qwix.quantize_model(model, qwix.PtqProvider([rule(weight_qtype="int4")])).init(
        jax.random.key(0), x
    )
    with pytest.raises(
        TypeError, match=r"parameters must be from jaxgemv\.qwix\.quantize_params; got a QArray"
    ):
        new.apply(stock, x)


def test_without_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    monkeypatch.delitem(sys.modules, "jaxgemv.qwix")
    with pytest.raises(ImportError, match=r'jaxgemv\.qwix needs Qwix: pip install "jaxgemv\[qwix\]"'):
        importlib.import_module("jaxgemv.qwix")
