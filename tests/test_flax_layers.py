"""`QuantEinsum`, `QuantEmbed`, and `QuantLinear` of many axes, against Flax's on the same weights as floats."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of, spec_of
from tolerance import assert_close, assert_equal

from jaxgemv import gemv, quantize

with warnings.catch_warnings():
    # Flax 0.12.0, the newest for jax 0.8.0, warns as it loads.
    warnings.filterwarnings("ignore", "jax.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

    from jaxgemv.flax.nnx import QuantEinsum, QuantEmbed, QuantizedKernel, QuantLinear

ROUNDING = {"bits": 4, "group_size": 16, "method": "minmax"}
BIAS = {"bias_init": nnx.initializers.normal(1.0)}


def inputs(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def assert_answers(y, x, layer, original, terms=1):
    """Flax's own answer with the same weights as floats, either of which may err. terms: of x, summed beside K."""
    original = nnx.clone(original)
    kernel = layer.kernel.dequantize()
    original.kernel = nnx.Param(kernel)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(original(x), np.float64)
    w, k = layer.kernel.tensor, layer.kernel.layout.k
    weight = np.abs(kernel).max() + np.abs(w.zero * w.scale).max()
    bias = 0 if layer.bias is None else np.abs(layer.bias[...]).max()
    magnitude = np.full(y.shape, float(terms * k * np.abs(x).max() * weight + bias))
    assert_close(y, expected, magnitude, k, dtype=y.dtype, factor=2)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("einsum_str", "kernel_shape", "bias_shape", "x_shape"),
    [
        ("btd,dnh->btnh", (32, 3, 8), (3, 8), (2, 5, 32)),
        ("BTNH,NHD->BTD", (3, 16, 24), (24,), (2, 5, 3, 16)),
        ("...d,dv->...v", (48, 10), None, (48,)),
        ("...d,vd->...v", (10, 48), (10,), (2, 3, 48)),
        ("td,hed->teh", (3, 5, 32), (5, 3), (7, 32)),
        ("nta,hab->nthb", (4, 16, 5), (4, 5), (2, 3, 16)),  # of nnx.Einsum's own docs
        ("bnd,ndh->bnh", (3, 32, 8), (3, 8), (4, 3, 32)),  # heads of x and the kernel: a stack
        ("bmnd,nmdh->mbhn", (2, 3, 32, 8), None, (4, 3, 2, 32)),
        ("bsd,dh->bh", (32, 8), (8,), (2, 3, 32)),  # an axis of x alone
    ],
)
def test_einsum(rng, einsum_str, kernel_shape, bias_shape, x_shape):
    original = nnx.Einsum(einsum_str, kernel_shape, bias_shape, rngs=nnx.Rngs(0), **BIAS)
    layer = QuantEinsum.from_einsum(original, **ROUNDING)
    assert layer.kernel.shape == kernel_shape
    assert (layer.kernel.ndim, layer.kernel.dtype) == (len(kernel_shape), jnp.float32)
    x = inputs(rng, *x_shape)
    assert_answers(layer(x), x, layer, original, terms=3 if einsum_str.startswith("bsd") else 1)
    assert layer.kernel.nbytes < 0.5 * original.kernel[...].nbytes


def test_einsum_init():
    """The constructor quantises what Flax's would have made."""
    shape = ("btd,dnh->btnh", (32, 3, 8), (3, 8))
    layer = QuantEinsum(*shape, rngs=nnx.Rngs(0), **BIAS, **ROUNDING)
    expected = QuantEinsum.from_einsum(nnx.Einsum(*shape, rngs=nnx.Rngs(0), **BIAS), **ROUNDING)
    assert_equal(nnx.state(layer), nnx.state(expected))
    assert layer.bias[...].shape == (3, 8)


def test_einsum_of_the_call(rng):
    """Another equation, of the same sums."""
    layer = QuantEinsum("btd,dnh->btnh", (32, 3, 8), rngs=nnx.Rngs(0), **ROUNDING)
    x = inputs(rng, 2, 5, 32)
    assert_equal(layer(x, "btd,dnh->nbth"), jnp.einsum("btnh->nbth", layer(x)))
    with pytest.raises(
        ValueError, match=r"QuantEinsum: the kernel \(32, 3, 8\) was quantised for products over"
    ):
        layer(inputs(rng, 2, 5, 3), "btn,dnh->btdh")


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dtype", "preferred"), [(None, None), ("bfloat16", None), ("bfloat16", "float32")])
def test_dtypes(rng, x_dtype, dtype, preferred):
    options = {"dtype": dtype, "preferred_element_type": preferred, "rngs": nnx.Rngs(0)}
    einsum = nnx.Einsum("btd,dnh->btnh", (32, 3, 8), (3, 8), **options)
    linear = nnx.LinearGeneral(32, (3, 8), **options)
    x = inputs(rng, 2, 5, 32, dtype=x_dtype)
    for original, layer in (
        (einsum, QuantEinsum.from_einsum(einsum, **ROUNDING)),
        (linear, QuantLinear.from_linear(linear, **ROUNDING)),
    ):
        expected = nnx.eval_shape(lambda layer, x: layer(x), original, x)
        y = layer(x)
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize(
    ("in_features", "out_features", "axis", "batch_axis", "x_shape"),
    [
        (32, 12, -1, {}, (2, 32)),
        (32, (3, 8), -1, {}, (2, 5, 32)),
        ((3, 16), 24, (-2, -1), {}, (2, 5, 3, 16)),
        (32, (4, 2), -1, {0: 3}, (3, 5, 32)),
        ((2, 16), 6, (-1, 1), {0: 3}, (3, 2, 5, 16)),
    ],
)
def test_linear_general(rng, in_features, out_features, axis, batch_axis, x_shape):
    options = {"axis": axis, "batch_axis": batch_axis, **BIAS}
    original = nnx.LinearGeneral(in_features, out_features, rngs=nnx.Rngs(0), **options)
    layer = QuantLinear.from_linear(original, **ROUNDING)
    assert layer.kernel.shape == original.kernel[...].shape
    assert layer.in_features == original.in_features
    x = inputs(rng, *x_shape)
    assert_answers(layer(x), x, layer, original)
    made = QuantLinear(in_features, out_features, rngs=nnx.Rngs(0), **options, **ROUNDING)
    assert_equal(jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(layer)))


def test_transformations(rng):
    """jit, vmap, gradients of bias and x, split and merge."""
    original = nnx.Einsum("bnd,ndh->bnh", (3, 32, 8), (3, 8), rngs=nnx.Rngs(0), **BIAS)
    layer = QuantEinsum.from_einsum(original, **ROUNDING)
    x = inputs(rng, 4, 3, 32)
    y = layer(x)
    original.kernel = nnx.Param(layer.kernel.dequantize())
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), y, atol=1e-5)
    ys = nnx.vmap(lambda layer, x: layer(x[None])[0], in_axes=(None, 0))(layer, x)
    np.testing.assert_allclose(ys, y, atol=1e-5)
    grads, dx = nnx.grad(lambda layer, x: jnp.sin(layer(x)).sum(), argnums=(0, 1))(layer, x)
    with jax.default_matmul_precision("highest"):
        expected, dx_expected = nnx.grad(lambda layer, x: jnp.sin(layer(x)).sum(), argnums=(0, 1))(
            original, x
        )
    np.testing.assert_allclose(dx, dx_expected, atol=1e-5)
    np.testing.assert_allclose(grads["bias"][...], expected["bias"][...], atol=1e-5)
    assert set(grads) == {"bias"}
    graph, codes, rest = nnx.split(layer, QuantizedKernel, ...)
    assert set(codes) == {"packed", "scale", "zero"}
    assert_equal(nnx.merge(graph, codes, rest)(x), y)


def embed(**options):
    original = nnx.Embed(24, 48, rngs=nnx.Rngs(0), **options)
    return original, QuantEmbed.from_embed(original, **ROUNDING)


def test_embed(rng):
    original, layer = embed()
    assert layer.embedding.shape == original.embedding[...].shape
    assert_equal(layer.embedding, quantize(original.embedding[...], **ROUNDING))
    floats = layer.embedding.dequantize()
    ids = jnp.asarray([[0, 5, 23], [1, -1, 5]])
    for f in (layer, jax.jit(lambda ids: layer(ids))):
        assert_equal(f(ids), floats[ids])
        assert_equal(f(jnp.asarray(7)), floats[7])
        assert np.isnan(f(jnp.asarray([3, 24, -25]))).all(axis=-1).tolist() == [False, True, True]
    x = inputs(rng, 2, 48)
    assert_equal(layer.attend(x), gemv(x, layer.embedding))
    assert_equal(x @ layer.embedding.T, layer.attend(x))
    made = QuantEmbed(24, 48, rngs=nnx.Rngs(0), **ROUNDING)
    assert_equal(nnx.state(made), nnx.state(layer))


@pytest.mark.numerics
@pytest.mark.parametrize("format", ["nf4", "mxfp4", "nvfp4", "fp8"])
def test_embed_formats(rng, format):
    original = nnx.Embed(6, 64, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    layer = QuantEmbed.from_embed(original, format=format, method="minmax")
    ids = jnp.asarray([[5, 0], [2, 2]])
    assert_equal(layer(ids), layer.embedding.dequantize(jnp.bfloat16)[ids])
    y = layer.attend(inputs(rng, 3, 64))
    assert (y.shape, y.dtype) == ((3, 6), jnp.bfloat16)


def test_embed_rows_alone_are_dequantised():
    """No array as large as the table is made."""
    layer = QuantEmbed(4096, 32, rngs=nnx.Rngs(0), **ROUNDING)
    graph, state = nnx.split(layer)
    compiled = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids)).lower(state, jnp.arange(5)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 32


def test_embed_of_one_row():
    layer = QuantEmbed(1, 48, rngs=nnx.Rngs(0), **ROUNDING)
    assert_equal(layer(jnp.asarray([3, 0])), jnp.repeat(layer.embedding.dequantize(), 2, axis=0))


def test_out_sharding(on_cpu, rng):
    """On a mesh with Explicit axes, several output axes too."""
    mesh = mesh_of(AxisType.Explicit)
    x = inputs(rng, 4, 2, 32)
    layer = QuantEinsum("btd,dnh->tbnh", (32, 4, 8), rngs=nnx.Rngs(0), **ROUNDING)
    linear = QuantLinear(32, (4, 8), rngs=nnx.Rngs(0), **ROUNDING)
    embed = QuantEmbed(8, 32, rngs=nnx.Rngs(0), **ROUNDING)
    expected = layer(x), linear(x), embed(jnp.arange(8))
    put = jax.tree_util.Partial(jax.device_put, device=NamedSharding(mesh, P()))
    layer, linear, embed = (
        nnx.merge(graph, jax.tree.map(put, state)) for graph, state in map(nnx.split, (layer, linear, embed))
    )
    with jax.set_mesh(mesh):
        x, ids = put(x), put(jnp.arange(8))
        y = jax.jit(lambda x: layer(x, out_sharding=P(None, "data", "model")))(x)
        z = jax.jit(lambda x: linear(x, out_sharding=P("data", None, "model")))(x)
        rows = jax.jit(lambda ids: embed(ids, out_sharding=P("data")))(ids)
    assert spec_of(y) == (None, "data", "model", None)
    assert spec_of(z) == ("data", None, "model", None)
    assert spec_of(rows) == ("data", None)
    for got, one in zip((y, z, rows), expected):
        np.testing.assert_array_equal(np.asarray(got), one)


def test_axis_names():
    """Of several axes that become one, the first that has a name."""
    names = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "heads", None), eager_sharding=False)
    layer = QuantEinsum("btd,dnh->btnh", (32, 4, 8), kernel_init=names, rngs=nnx.Rngs(0), **ROUNDING)
    metadata = layer.packed.get_metadata()
    assert tuple(metadata.get("out_sharding") or metadata.get("sharding_names")) == ("heads", "embed")


@pytest.mark.parametrize(
    ("einsum_str", "error", "message"),
    [
        ("btd,dnh", ValueError, "einsum_str must be like 'x,kernel->result'; got 'btd,dnh'"),
        ("btd,dh->bth", ValueError, "einsum_str must have 3 labels for the kernel"),
        ("btd,dnh->btnz", ValueError, "einsum_str must have labels of its operands in the result; got {'z'}"),
        ("bt,dnh->btdnh", NotImplementedError, "must be a sum of products"),
        ("bdd,dnh->bnh", NotImplementedError, "each label once in an operand"),
        ("btd,dnh->btn", NotImplementedError, "must be a sum of products"),
        ("btd,...d->bt...", NotImplementedError, "no ellipsis in the kernel"),
    ],
)
def test_einsum_refuses(einsum_str, error, message):
    with pytest.raises(error, match=f"QuantEinsum: .*{message}"):
        QuantEinsum(einsum_str, (32, 4, 8), rngs=nnx.Rngs(0))


def test_refused_arguments(rng):
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="QuantEinsum: einsum_op must be the default, einsum"):
        QuantEinsum("ab,bc->ac", (4, 8), einsum_op=print, rngs=rngs)
    with pytest.raises(ValueError, match="QuantEmbed: promote_dtype must be the default"):
        QuantEmbed(4, 8, promote_dtype=print, rngs=rngs)
    with pytest.raises(
        ValueError, match=r"QuantLinear: axis must have as many entries as in_features, \(4, 8\)"
    ):
        QuantLinear((4, 8), 4, rngs=rngs)
    with pytest.raises(TypeError, match=r"from_einsum: layer must be a flax\.nnx\.Einsum; got Linear"):
        QuantEinsum.from_einsum(nnx.Linear(4, 8, rngs=rngs))
    with pytest.raises(TypeError, match=r"from_embed: embed must be a flax\.nnx\.Embed; got Linear"):
        QuantEmbed.from_embed(nnx.Linear(4, 8, rngs=rngs))
    layer = QuantEinsum("btnh,nhd->btd", (4, 16, 8), rngs=rngs, **ROUNDING)
    with pytest.raises(
        ValueError, match=r"QuantEinsum: x must have sizes \[4, 16\] along axes \[2, 3\]; got \[8, 8\]"
    ):
        layer(inputs(rng, 1, 2, 8, 8))
    with pytest.raises(ValueError, match=r"QuantEinsum: x must have 4 axes, 'btnh'; got shape \(2, 4, 16\)"):
        layer(inputs(rng, 2, 4, 16))
    with pytest.raises(ValueError, match="QuantEmbed: inputs must be an integer array; got float32"):
        embed()[1](jnp.ones(3))
    with pytest.raises(TypeError, match=r"Kernel: index must be \.\.\."):
        layer.kernel[0]
    assert layer.kernel[...].shape == (4, 16, 8)
