"""`jaxgemv.flax.nnx.quantize_model`: which layers, what it says of them, what memory it takes."""

import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nnx_block import ROUNDING, Block, D, F
from tolerance import assert_equal

from jaxgemv import quantize

with warnings.catch_warnings():
    # Flax 0.12.0, the newest for jax 0.8.0, warns as it loads.
    warnings.filterwarnings("ignore", "jax.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

    from jaxgemv.flax.nnx import QuantEinsum, QuantEmbed, QuantizedKernel, QuantLinear, quantize_model

V = 40
INT3 = {"bits": 3, "group_size": None, "scale_dtype": jnp.float16, "method": "minmax"}
NVFP4 = {"format": "nvfp4", "method": "minmax"}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([Block(rngs)])
        self.more = nnx.data({"a": Block(rngs), "b": (Block(rngs),)})
        self.repeated = self.layers[0]
        self.drop = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in (*self.layers, self.more["a"], *self.more["b"], self.repeated):
            x = layer(x)
        return self.embed.attend(self.drop(x))


@pytest.fixture(scope="module")
def made():
    return nnx.jit(lambda: Model(nnx.Rngs(0)))()


@pytest.fixture
def model(made):
    return nnx.clone(made)


@pytest.fixture
def ids(rng):
    return jnp.asarray(rng.integers(0, V, (2, 3)))


def state(model):
    return nnx.to_pure_dict(nnx.state(model))


def records(model, **options):
    found = []
    return quantize_model(model, report=found.append, **options), {r.path: r for r in found}


def dequantised(original, quantised):
    """The original with the weights of the other as floats."""
    model = nnx.clone(original)
    layers = dict(nnx.iter_graph(quantised))
    for path, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Embed):
            layer.embedding = nnx.Param(layers[path].embedding.dequantize())
        elif isinstance(layers.get(path), QuantLinear | QuantEinsum):
            assert layers[path].kernel.shape == layer.kernel.shape
            layer.kernel = nnx.Param(layers[path].kernel.dequantize())
    return model


def test_answer(model, ids):
    """That of the float model with the same weights, and of the given one about; which is untouched."""
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    new = quantize_model(model, **ROUNDING)
    with jax.default_matmul_precision("highest"):
        expected, about = dequantised(model, new)(ids), model(ids)
    assert_equal(nnx.state(model, nnx.Param), before)
    y = new(ids)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=2e-5 * largest)
    np.testing.assert_allclose(y, about, atol=0.1 * largest)
    again = nnx.jit(lambda model, ids: model(ids))(new, ids)
    np.testing.assert_allclose(again, y, atol=2e-5 * largest)
    assert_equal(nnx.merge(*nnx.split(new))(ids), y)
    ys = nnx.vmap(lambda model, ids: model(ids[None])[0], in_axes=(None, 0))(new, ids)
    np.testing.assert_allclose(ys, y, atol=2e-5 * largest)


def test_layers(model):
    new, found = records(model, **ROUNDING)
    block = new.layers[0]
    kinds = [type(layer) for layer in (new.embed, block.q, block.o, block.up, block.down)]
    assert kinds == [QuantEmbed, QuantEinsum, QuantEinsum, QuantLinear, QuantLinear]
    assert new.repeated is block
    assert type(new.more["b"]) is tuple
    assert type(new.more["b"][0].up) is QuantLinear
    assert type(block.norm) is nnx.RMSNorm
    assert_equal(block.up.kernel.tensor, quantize(model.layers[0].up.kernel[...], in_axis=0, **ROUNDING))

    made = {path for path, r in found.items() if r.what != "kept"}
    blocks = "layers/0", "more/a", "more/b/0"
    assert made == {"embed/embedding"} | {
        f"{block}/{name}/kernel" for block in blocks for name in ("q", "o", "up", "down")
    }
    assert found["more/b/0/o/kernel"].what == "8 bits, 64x64"
    assert found["more/b/0/o/kernel"].why == "is the kernel of Einsum"
    assert found["layers/0/norm/scale"].why == "is in RMSNorm, not Linear, LinearGeneral, Einsum, Embed"
    assert found["layers/0/up/bias"].why == "is the bias of Linear"
    r = found["more/a/up/kernel"]
    assert (r.before, r.after) == (4 * D * F, new.more["a"].up.kernel.nbytes)
    before, after = (sum(a.nbytes for a in jax.tree.leaves(nnx.state(m, ...))) for m in (model, new))
    assert (before, after) == (sum(r.before for r in found.values()), sum(r.after for r in found.values()))

    same, found = records(new)
    assert_equal(nnx.state(same, QuantizedKernel), nnx.state(new, QuantizedKernel))
    assert found["embed/packed"].why == "is quantised already"


def test_a_layer_alone():
    linear = nnx.Linear(D, F, rngs=nnx.Rngs(0))
    assert_equal(quantize_model(linear, bits=3), QuantLinear.from_linear(linear, bits=3))


def test_predicate(model):
    def predicate(path, array):
        if path.startswith("embed"):
            return {"bits": 4, "format": "nf4"}
        return path.startswith("layers/0") and array.ndim == 2

    new, found = records(model, predicate=predicate, bits=3)
    assert (new.embed.format, new.embed.bits, new.layers[0].up.bits) == ("nf4", 4, 3)
    assert type(new.layers[0].q) is nnx.Einsum
    assert type(new.more["a"].up) is nnx.Linear
    assert found["more/a/up/kernel"].why == "predicate"
    assert found["embed/embedding"].why == "predicate gave arguments"


def test_importance(rng):
    linear = nnx.Linear(D, F, rngs=nnx.Rngs(0))
    importance = jnp.asarray(rng.uniform(size=D), jnp.float32)
    new = quantize_model(linear, predicate=lambda path, array: {"importance": importance}, bits=3)
    assert_equal(new.kernel.tensor, quantize(linear.kernel[...], in_axis=0, bits=3, importance=importance))


class Many(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(256, 256, use_bias=False, rngs=rngs) for _ in range(6)])


def test_donate():
    """Memory never holds more than the model and one leaf."""
    model = Many(nnx.Rngs(0))
    kernels = [layer.kernel[...] for layer in model.layers]
    kept, alive, live = quantize_model(model, method="minmax"), [], []

    def report(record):
        alive.append(sum(not kernel.is_deleted() for kernel in kernels))
        live.append(sum(a.nbytes for a in jax.live_arrays()))

    before = sum(a.nbytes for a in jax.live_arrays())
    new = quantize_model(model, donate=True, report=report, method="minmax")
    assert alive == [5, 4, 3, 2, 1, 0]
    assert max(live) < before
    codes = sum(a.nbytes for a in jax.tree.leaves(nnx.state(new)))
    assert live[-1] == before - 6 * kernels[0].nbytes + codes
    assert_equal(nnx.state(new), nnx.state(kept))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(D, D, rngs=rngs)
        self.b.kernel = self.a.kernel
        self.c = nnx.Embed(D, D, rngs=rngs)
        self.free = nnx.Param(self.c.embedding[...])


@pytest.mark.parametrize("donate", [False, True])
def test_shared_weights(donate):
    """Layers with one kernel share its codes; an array that something else holds is not deleted."""
    model = Tied(nnx.Rngs(0))
    kernel = model.a.kernel[...]
    expected = quantize(kernel, in_axis=0, method="minmax")
    new = quantize_model(model, donate=donate, method="minmax")
    assert new.a.packed is new.b.packed
    assert new.b.bias is not None
    assert_equal(new.b.kernel.tensor, expected)
    assert kernel.is_deleted() == donate
    assert not new.free[...].is_deleted()


def test_stacks(rng):
    """As nnx.vmap makes them, and scan runs over them."""

    @nnx.vmap
    def make(key):
        return Block(nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    new = quantize_model(stack, **ROUNDING)
    assert new.q.kernel.shape == (3, D, 4, 16)
    assert new.up.kernel.tensor.shape == (3, F, D)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    x = jnp.asarray(rng.standard_normal((1, 2, D)), jnp.float32)
    y, expected = run(x, new), x
    graph, arrays = nnx.split(new)
    for i in range(3):
        expected = nnx.merge(graph, jax.tree.map(operator.itemgetter(i), arrays))(expected)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_other_stacks_stay():
    stack = nnx.vmap(lambda key: nnx.Linear(D, F, rngs=nnx.Rngs(key)), out_axes=1)(
        jax.random.split(jax.random.key(0), 3)
    )
    new, found = records(stack)
    assert type(new) is nnx.Linear
    assert found["kernel"].why == "has shape (64, 3, 96), where stacks in front of (64, 96) can be quantised"


class Gated(nnx.Linear):
    def __call__(self, inputs):
        return nnx.sigmoid(super().__call__(inputs))


def test_what_stays():
    """Layers that compute something else, each with the reason; arguments that are asked for do not change that."""
    rngs = nnx.Rngs(0)
    layers = {
        "gated": Gated(D, D, rngs=rngs),
        "lora": nnx.LoRALinear(D, D, lora_rank=2, rngs=rngs),
        "conv": nnx.Conv(D, D, (3,), rngs=rngs),
        "exact": nnx.Linear(D, D, precision="high", rngs=rngs),
        "hook": nnx.LinearGeneral(D, D, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=rngs),
        "outer": nnx.Einsum("a,b->ab", (4, 8)[1:], rngs=rngs, kernel_init=nnx.initializers.ones),
    }
    model = nnx.Dict(layers)
    new, found = records(model, predicate=lambda path, array: True)
    assert all(r.what == "kept" for r in found.values())
    assert list(dict.fromkeys(path.partition("/")[0] for path in found)) == list(
        layers
    )  # as they were defined
    assert found["gated/kernel"].why.startswith("is in Gated, not Linear")
    assert found["lora/kernel"].why.startswith("is in LoRALinear")
    assert found["conv/kernel"].why.startswith("is in Conv")
    assert found["exact/kernel"].why.startswith("QuantLinear: precision must be None, DEFAULT or HIGHEST")
    assert found["hook/kernel"].why.startswith("QuantLinear: dot_general must be the default")
    assert found["outer/kernel"].why.startswith("QuantEinsum: einsum_str must be a sum of products")
    x = jnp.ones((2, D))
    assert_equal(new["gated"](x), model["gated"](x))


def test_nothing_to_quantise():
    """A warning, unless something else says so, or all is quantised already."""
    conv = nnx.Conv(D, D, (3,), rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="nothing is quantised: 'kernel' is in Conv, not Linear"):
        quantize_model(conv)
    quantize_model(conv, predicate=lambda path, array: True)
    quantize_model(quantize_model(nnx.Linear(D, D, rngs=nnx.Rngs(0))))
    quantize_model(nnx.LayerNorm(D, rngs=nnx.Rngs(0)))


def test_multi_head_attention(rng):
    attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))
    new = quantize_model(attention, **ROUNDING)
    assert new.query.kernel.shape == (D, 4, 16)
    x = jnp.asarray(rng.standard_normal((2, 5, D)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        y, expected = new(x), dequantised(attention, new)(x)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_gradients_leave_the_codes(model, ids):
    new = quantize_model(model, **ROUNDING)
    grads = nnx.to_pure_dict(nnx.grad(lambda model: model(ids).sum())(new))
    assert set(grads["more"]["a"]) == {"q", "up", "down", "norm"}  # their biases and the scale
    assert "embed" not in grads


def restored(abstract, arrays):
    graph, blank = nnx.split(abstract)
    nnx.replace_by_pure_dict(blank, arrays)
    return nnx.merge(graph, blank)


def test_of_shapes(model):
    """A model of shapes becomes one, and its weights are known by shape and dtype."""
    shapes = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    made = quantize_model(shapes, **ROUNDING)
    for abstract in (made, nnx.eval_shape(lambda: quantize_model(Model(nnx.Rngs(0)), **ROUNDING))):
        of_arrays = quantize_model(model, **ROUNDING)
        kinds, expected = (
            jax.tree.map(lambda a: f"{a.dtype}{a.shape}", state(each)) for each in (abstract, of_arrays)
        )
        assert kinds == expected
        up, expected = abstract.layers[0].up.kernel, of_arrays.layers[0].up.kernel
        assert (up.shape, up.dtype, up.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
        assert abstract.embed.embedding.shape == (V, D)
    embed = nnx.eval_shape(lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0)))
    assert QuantEmbed.from_embed(embed, bits=8).dtype == jnp.float32


def test_orbax(model, ids, tmp_path):
    """Into the model that nnx.eval_shape gives."""
    ocp = pytest.importorskip("orbax.checkpoint")
    new = quantize_model(model, **NVFP4)
    abstract = nnx.eval_shape(lambda: quantize_model(Model(nnx.Rngs(0)), **NVFP4))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(new, QuantizedKernel, nnx.Param)[0])
        checkpointer.save(tmp_path / "rest", nnx.state(new, QuantizedKernel, nnx.Param)[1])
        checkpointer.wait_until_finished()
        parts = nnx.state(abstract, QuantizedKernel, nnx.Param)
        on = jax.tree.map(ocp.utils.to_shape_dtype_struct, parts)
        for name, part in zip(("model", "rest"), on):
            nnx.update(abstract, checkpointer.restore(tmp_path / name, part))
    abstract.drop = new.drop
    assert_equal(abstract(ids), new(ids))


def test_safetensors(model, ids, tmp_path):
    """By the names of the variables."""
    safetensors = pytest.importorskip("safetensors.numpy")
    del model.drop.rngs
    new = quantize_model(model, **INT3)
    flat = {
        "/".join(map(str, path)): np.asarray(a)
        for path, a in nnx.traversals.flatten_mapping(state(new)).items()
    }
    safetensors.save_file(flat, tmp_path / "model.safetensors")
    arrays = safetensors.load_file(tmp_path / "model.safetensors")

    def blank():
        blank = Model(nnx.Rngs(0))
        del blank.drop.rngs
        return quantize_model(blank, **INT3)

    abstract = nnx.eval_shape(blank)
    paths = nnx.traversals.flatten_mapping(state(abstract))
    tree = nnx.traversals.unflatten_mapping({path: arrays["/".join(map(str, path))] for path in paths})
    assert_equal(restored(abstract, tree)(ids), new(ids))


def test_errors(model):
    with pytest.raises(TypeError, match=r"quantize_model: model must be a flax\.nnx\.Module; got dict"):
        quantize_model({})
    with pytest.raises(
        ValueError,
        match="quantize_model: embed/embedding: quantize: bits must be an integer from 1 to 8; got 9",
    ):
        quantize_model(model, bits=9)
    with pytest.raises(
        TypeError, match="predicate must give a bool or a dict for embed/embedding; got 'yes'"
    ):
        quantize_model(model, predicate=lambda path, array: "yes")
    with pytest.raises(TypeError, match="quantize_model: report must be a function or None; got True"):
        quantize_model(model, report=True)
    with pytest.raises(TypeError, match=r"arguments must be among bits, format, .*; got in_axis"):
        quantize_model(model, in_axis=0)
    with pytest.raises(
        TypeError, match=r"x @ kernel is not there; call the layer, or write x @ kernel\.tensor\.T"
    ):
        jnp.ones((2, D)) @ quantize_model(nnx.Linear(D, F, rngs=nnx.Rngs(0))).kernel


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_normalised_kernels_stay(name):
    """What wraps a layer changes its kernel in each call, which codes cannot do."""
    wrapper = getattr(nnx, name, None)
    if wrapper is None:
        pytest.skip(f"this Flax has no {name}")
    layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    records = []
    new = quantize_model(wrapper(layer, rngs=nnx.Rngs(1)), report=records.append)
    (why,) = (r.why for r in records if r.path.endswith("kernel") and r.before == 64 * 32 * 4)
    assert why == f"is in {name}, which changes it in each call"
    assert any(isinstance(node, nnx.Linear) for _, node in nnx.iter_graph(new))


def test_x_of_another_width():
    small = quantize_model(nnx.Linear(64, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="x must have shape"):
        small(jnp.ones((1, 63)))
