"""`quantize_tree`: which leaves, what it says of them, what memory it takes, and where the arrays lie."""

import gc
from collections import UserDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of

import jaxgemv.formats
from jaxgemv import QuantizedTensor, dequantize, gemv, quantize, quantize_tree
from jaxgemv._formats import FORMATS


@pytest.fixture
def params(rng):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "embed": {"embedding": normal(64, 128)},
        "layers": [
            {"up": {"kernel": normal(128, 96), "bias": normal(96)}, "norm": {"scale": normal(128)}},
            {"up": {"kernel": normal(128, 96)}, "steps": jnp.arange(3)},
        ],
        "stack": {"w": normal(3, 128, 32)},
    }


def test_default_leaves(params):
    records = []
    new = quantize_tree(params, in_axis=-2, bits=8, group_size=32, report=records.append)
    assert isinstance(new["layers"][0]["up"]["kernel"], QuantizedTensor)
    assert new["layers"][0]["up"]["kernel"].shape == (96, 128)
    assert new["stack"]["w"].shape == (3, 32, 128)
    assert new["embed"]["embedding"] is params["embed"]["embedding"]
    assert new["layers"][0]["up"]["bias"] is params["layers"][0]["up"]["bias"]
    kept = {r.path: r.why for r in records if r.what == "kept"}
    assert kept == {
        "embed/embedding": "ends in embedding, not kernel, weight, w",
        "layers/0/norm/scale": "has 1 dimension",
        "layers/0/up/bias": "has 1 dimension",
        "layers/1/steps": "is no float array",
    }
    made = {r.path: r for r in records if r.what != "kept"}
    assert set(made) == {"layers/0/up/kernel", "layers/1/up/kernel", "stack/w"}
    r = made["stack/w"]
    assert (r.what, r.why, r.before) == ("8 bits, 3x32x128", "ends in w", 3 * 128 * 32 * 4)
    assert r.after == new["stack"]["w"].nbytes < r.before / 3
    expected = quantize(params["stack"]["w"], bits=8, group_size=32, in_axis=-2)
    np.testing.assert_array_equal(dequantize(new["stack"]["w"]), dequantize(expected))


def test_no_name_is_ours(params):
    """A warning, unless something else says so."""
    tree = {"W1": params["stack"]["w"], "b": jnp.zeros(3)}
    with pytest.warns(UserWarning, match="nothing is quantised, since no path ends in .*; got 'W1'"):
        assert quantize_tree(tree, in_axis=-2) == tree
    assert quantize_tree(tree, in_axis=-2, report=lambda record: None) == tree
    assert quantize_tree(tree, in_axis=-2, predicate=lambda path, array: False) == tree
    assert quantize_tree({"b": tree["b"]}, in_axis=-2) == {"b": tree["b"]}
    new = quantize_tree(tree, in_axis=-2, predicate=lambda path, array: True)
    assert new["W1"].shape == (3, 32, 128)
    assert quantize_tree(new, in_axis=-2) == new


def test_flat_names(params):
    """As safetensors and `formats.open` have them."""
    tree = {"model.layers.0.up.weight": params["embed"]["embedding"], "model.norm.weight": jnp.ones(3)}
    new = quantize_tree(tree, in_axis=-1)
    assert {name: isinstance(w, QuantizedTensor) for name, w in new.items()} == dict.fromkeys(tree, False) | {
        "model.layers.0.up.weight": True
    }


@pytest.mark.parametrize("in_axis", [0, -3])
def test_more_dimensions_than_a_matrix(params, in_axis):
    """K is one of the last two by default, as in kernels of convolutions and stacks it hardly ever is the first."""
    stack, records = params["stack"], []
    assert quantize_tree(stack, in_axis=in_axis, report=records.append) == stack
    assert [r.why for r in records] == [f"has 3 dimensions, and in_axis={in_axis} is not one of the last two"]
    with pytest.warns(UserWarning, match="nothing is quantised: 'w' has 3 dimensions, and in_axis="):
        quantize_tree(stack, in_axis=in_axis)
    chosen = quantize_tree(stack, in_axis=in_axis, predicate=lambda path, array: True)
    assert chosen["w"].shape == (128, 32, 3)


def test_errors_of_few_columns_have_the_path():
    for arguments, text in ({"in_axis": 5}, "in_axis must be"), ({"in_axis": -1, "bits": 9}, "bits must be"):
        with pytest.raises(ValueError, match=f"quantize_tree: a/w: quantize: {text}"):
            quantize_tree({"a": {"w": jnp.ones((4, 8))}}, **arguments)


def test_what_would_be_no_smaller():
    """As a kernel (out, in, width) of a convolution, of which in_axis is the width."""
    tree, records = {"conv.weight": jnp.ones((80, 40, 3)), "none.weight": jnp.ones((2, 0))}, []
    assert quantize_tree(tree, in_axis=-1, report=records.append) == tree
    assert [r.why for r in records] == [
        "would be no smaller: its input features, in_axis=-1, are 3",
        "is empty",
    ]
    chosen = quantize_tree(tree, in_axis=-1, predicate=lambda path, array: True)
    assert chosen["conv.weight"].shape == (80, 40, 3)
    assert chosen["none.weight"] is tree["none.weight"]


@pytest.mark.parametrize(
    ("tree", "text"),
    [("a model", "got str"), ([UserDict(w=np.ones((4, 32)))], r"got UserDict; pass dict\(tree\)")],
)
def test_no_arrays(tree, text):
    with pytest.raises(TypeError, match=f"quantize_tree: tree must have arrays; {text}"):
        quantize_tree(tree, in_axis=-1)
    assert quantize_tree({"rate": 0.1}, in_axis=-1) == {"rate": 0.1}


def test_predicate(params):
    """Gives a bool, or arguments for a leaf; and quantised leaves stay."""

    def predicate(path, array):
        if path.startswith("embed"):
            return {"bits": 4, "in_axis": -1}
        return "layers/0" in path and array.ndim == 2

    new = quantize_tree(params, in_axis=0, bits=8, predicate=predicate)
    assert (new["embed"]["embedding"].bits, new["embed"]["embedding"].shape) == (4, (64, 128))
    assert new["layers"][0]["up"]["kernel"].bits == 8
    assert new["layers"][1]["up"]["kernel"] is params["layers"][1]["up"]["kernel"]
    again = quantize_tree(new, in_axis=0)
    assert again["embed"]["embedding"] is new["embed"]["embedding"]
    assert isinstance(again["layers"][1]["up"]["kernel"], QuantizedTensor)


def test_donate(params, rng):
    """Memory never holds more than the tree and one leaf."""
    tree = {f"{i}": {"kernel": jnp.asarray(rng.standard_normal((256, 256)), jnp.float32)} for i in range(6)}
    kernels = [leaf["kernel"] for leaf in tree.values()]
    gc.collect()  # arrays of other tests, in cycles, are not to go in between
    alive, before = [], len(jax.live_arrays())
    new = quantize_tree(
        tree,
        in_axis=0,
        donate=True,
        report=lambda record: alive.append(sum(not k.is_deleted() for k in kernels)),
    )
    assert alive == [5, 4, 3, 2, 1, 0]
    # Of each leaf what it became, and nothing else.
    assert len(jax.live_arrays()) == before - 6 + len(jax.tree.leaves(new))
    kept = quantize_tree(params, in_axis=-2)
    assert not params["layers"][0]["up"]["kernel"].is_deleted()
    assert kept["layers"][0]["up"]["bias"] is params["layers"][0]["up"]["bias"]


def test_donate_what_occurs_twice(params):
    """It goes with its last use, and stays where it is also kept."""
    kernel = params["stack"]["w"] + 0
    new = quantize_tree({"head": {"kernel": kernel}, "table": kernel}, in_axis=-2, donate=True)
    assert isinstance(new["head"]["kernel"], QuantizedTensor)
    np.testing.assert_array_equal(new["table"], params["stack"]["w"])
    new = quantize_tree({"a": {"kernel": kernel}, "b": {"kernel": kernel}}, in_axis=-2, donate=True)
    assert isinstance(new["b"]["kernel"], QuantizedTensor)
    assert kernel.is_deleted()


def test_under_jit(params):
    new = jax.jit(lambda tree: quantize_tree(tree, in_axis=-2, donate=True))(params)
    expected = quantize_tree(params, in_axis=-2)
    jax.tree.map(np.testing.assert_array_equal, new, expected)


@pytest.mark.parametrize(
    ("spec", "packed"),
    [(P("model", "data"), P("data", "model")), (P(None, "model"), P("model")), (P("data"), P(None, "data"))],
    ids=str,
)
def test_sharded_stays_sharded(spec, packed, on_cpu, rng):
    mesh = mesh_of(AxisType.Auto)
    kernel = jnp.asarray(rng.standard_normal((512, 64)), jnp.float32)
    tree = {"kernel": jax.device_put(kernel, NamedSharding(mesh, spec))}
    w = quantize_tree(tree, in_axis=0, group_size=64)["kernel"]
    for a in (w.packed, w.scale):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, packed), 2)
    expected = quantize(kernel, in_axis=0, group_size=64)
    np.testing.assert_array_equal(w.packed, expected.packed)
    x = jnp.ones((2, 512))
    with jax.set_mesh(mesh):
        y = jax.jit(gemv)(jax.device_put(x, NamedSharding(mesh, P())), w)
    np.testing.assert_allclose(y, gemv(x, expected), rtol=1e-5, atol=1e-3)


def test_parts_of_odd_words_are_not_cut(on_cpu, rng):
    """K = 96 in groups of 32 over four devices would be a part of a group."""
    mesh = mesh_of(AxisType.Auto)
    kernel = jnp.asarray(rng.standard_normal((96, 64)), jnp.float32)
    tree = {"kernel": jax.device_put(kernel, NamedSharding(mesh, P("model")))}
    w = quantize_tree(tree, in_axis=0, group_size=32)["kernel"]
    assert w.packed.sharding.is_equivalent_to(NamedSharding(mesh, P()), 2)


def test_errors(params):
    with pytest.raises(
        ValueError, match="quantize_tree: layers/0/up/kernel: quantize: bits must be an integer"
    ):
        quantize_tree(params, in_axis=0, bits=9)
    with pytest.raises(
        TypeError, match="predicate must give a bool or a dict for embed/embedding; got 'yes'"
    ):
        quantize_tree(params, in_axis=0, predicate=lambda path, array: "yes")
    with pytest.raises(TypeError, match=r"arguments must be those of quantize, bits, .*; got groupsize"):
        quantize_tree({}, in_axis=0, groupsize=64)
    with pytest.raises(TypeError, match=r"quantize_tree: [\w/]+: arguments must be .*; got groupsize"):
        quantize_tree(params, in_axis=-2, predicate=lambda path, array: {"groupsize": 64})
    with pytest.raises(TypeError, match="in_axis"):
        quantize_tree(params)  # pyright: ignore[reportCallIssue]
    for in_axis in (None, "0", 0.0, True):
        with pytest.raises(ValueError, match="quantize_tree: in_axis must be an axis of each matrix; got "):
            quantize_tree(params, in_axis=in_axis)
    for name, given in (("predicate", "x"), ("report", True)):
        with pytest.raises(
            TypeError, match=f"quantize_tree: {name} must be a function or None; got {given!r}"
        ):
            quantize_tree(params, in_axis=0, **{name: given})


def test_a_dense_model_says_what_to_write(params):
    """Where code of a model multiplies with a kernel that has become a tensor."""
    new = quantize_tree(params, in_axis=-2)
    kernel = new["layers"][0]["up"]["kernel"]
    x = jnp.ones((2, 128))
    with pytest.raises(TypeError, match=r"write x @ w\.T, or jaxgemv\.gemv\(x, w\)"):
        x @ kernel
    np.testing.assert_array_equal(x @ kernel.T, gemv(x, kernel))


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_safetensors(params, format, tmp_path):
    """Saved as arrays with names, and restored into what the shapes of the model's arrays become."""
    safetensors = pytest.importorskip("safetensors.numpy")
    new = quantize_tree(params, in_axis=-2, format=format)
    leaves = jax.tree.leaves(new)
    safetensors.save_file({str(i): np.asarray(a) for i, a in enumerate(leaves)}, tmp_path / "m.safetensors")
    arrays = jaxgemv.formats.open(tmp_path / "m.safetensors")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    blank = quantize_tree(shapes, in_axis=-2, format=format)
    assert jax.tree.leaves(blank) == [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    restored = jax.tree.structure(blank).unflatten([arrays[str(i)] for i in range(len(leaves))])
    x = jnp.ones((2, 128))
    y, again = (x @ tree["layers"][0]["up"]["kernel"].T for tree in (new, restored))
    np.testing.assert_array_equal(y, again)


def test_orbax(params, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    new = quantize_tree(params, in_axis=-2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", new)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "tree", jax.tree.map(ocp.utils.to_shape_dtype_struct, new))
    jax.tree.map(np.testing.assert_array_equal, new, restored)
    assert jaxgemv.QuantizedTensor is type(restored["stack"]["w"])
