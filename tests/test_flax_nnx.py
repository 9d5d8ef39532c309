"""`QuantLinear` against `nnx.Linear`, and against the float64 answer from the bytes of its kernel."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import Problem
from sharded import mesh_of, put, spec_of
from tolerance import assert_close, assert_equal

from jaxgemv import gemv, quantize

with warnings.catch_warnings():
    # Flax 0.12.0, the newest for jax 0.8.0, warns as it loads.
    warnings.filterwarnings("ignore", "jax.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

    from jaxgemv.flax.nnx import QuantizedKernel, QuantLinear

K, N, GROUP = 70, 24, 32  # neither words nor groups come out even


def linear(use_bias=True, dtype=jnp.float32, **options):
    """An nnx.Linear with a bias that is not zero."""
    options = {"bias_init": nnx.initializers.normal(1.0), "rngs": nnx.Rngs(0)} | options
    return nnx.Linear(K, N, use_bias=use_bias, param_dtype=dtype, **options)


def inputs(rng, *lead, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal((*lead, K)), dtype)


def problem(layer, x):
    """The same product from the layer's arrays alone."""
    w = layer.kernel.tensor
    return Problem(
        x=x,
        packed=np.asarray(w.packed),
        scale=np.asarray(w.scale),
        zero=None if w.zero is None else np.asarray(w.zero),
        offset=None if w.offset is None else np.asarray(w.offset),
        bias=None if layer.bias is None else np.asarray(layer.bias[...]),
        bits=layer.bits,
        group=min(layer.group_size or K, K),
    )


def assert_answers(y, layer, x, dtype=jnp.float32):
    p = problem(layer, x)
    assert_close(y, p.answer(), p.magnitude(), K, dtype=dtype)


@pytest.mark.parametrize(("bits", "group_size"), [(1, GROUP), (3, None), (4, 128), (4, None), (8, GROUP)])
def test_answer(rng, bits, group_size):
    layer = QuantLinear.from_linear(linear(), bits=bits, group_size=group_size)
    x = inputs(rng, 3)
    assert_answers(layer(x), layer, x)


@pytest.mark.parametrize(
    ("lead", "use_bias", "symmetric"),
    [((), True, False), ((), False, True), ((3,), True, True), ((2, 5), True, False), ((2, 5), False, False)],
)
def test_answer_of_any_rank(rng, lead, use_bias, symmetric):
    layer = QuantLinear.from_linear(linear(use_bias), group_size=GROUP, symmetric=symmetric)
    x = inputs(rng, *lead)
    assert (layer.zero is None) == symmetric
    assert_answers(layer(x), layer, x)
    assert_answers(nnx.jit(lambda layer, x: layer(x))(layer, x), layer, x)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("param_dtype", "dtype", "preferred"),
    [
        ("float32", None, None),
        ("float16", None, None),
        ("float32", "bfloat16", None),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", None, "bfloat16"),
    ],
)
def test_dtypes_as_in_linear(rng, x_dtype, param_dtype, dtype, preferred):
    original = linear(dtype=param_dtype)
    original.dtype, original.preferred_element_type = dtype, preferred
    layer = QuantLinear.from_linear(original, group_size=GROUP)
    x = (3 * inputs(rng, 2)).astype(x_dtype)
    expected = nnx.eval_shape(lambda layer, x: layer(x), original, x).dtype
    computation = jnp.result_type(x_dtype, param_dtype) if dtype is None else dtype
    assert_answers(layer(x), layer, x.astype(computation), expected)


def test_scale_dtype_is_the_dtype_of_the_kernel(rng):
    layer = QuantLinear.from_linear(linear(use_bias=False), group_size=GROUP, scale_dtype=jnp.bfloat16)
    x = inputs(rng, 2, dtype=jnp.bfloat16)
    assert layer.scale[...].dtype == jnp.bfloat16
    assert_answers(layer(x), layer, x, jnp.bfloat16)


def test_same_as_linear_on_the_dequantised_kernel(rng):
    original = linear(precision="highest")
    layer = QuantLinear.from_linear(original, group_size=GROUP)
    assert layer.kernel.shape == original.kernel.shape
    original.kernel = nnx.Param(layer.kernel.dequantize())
    x = inputs(rng, 4)
    exact = np.asarray(layer(x), np.float64)
    assert_close(original(x), exact, problem(layer, x).magnitude(), K, dtype=jnp.float32, factor=2)


def test_init_quantises_what_linear_would_have():
    expected = QuantLinear.from_linear(linear(), bits=3, group_size=GROUP)
    options = {"bits": 3, "group_size": GROUP, "bias_init": nnx.initializers.normal(1.0)}

    def make():
        return QuantLinear(K, N, rngs=nnx.Rngs(0), **options)

    assert_equal(nnx.state(make()), nnx.state(expected))
    states = [nnx.to_pure_dict(nnx.state(layer)) for layer in (nnx.eval_shape(make), expected)]
    assert jax.tree.map(jnp.shape, states[0]) == jax.tree.map(jnp.shape, states[1])


def test_from_linear_keeps_the_fields():
    original = linear(use_bias=False, dtype=jnp.bfloat16, precision="highest")
    layer = QuantLinear.from_linear(original, bits=2, implementation="xla")
    assert (layer.in_features, layer.out_features, layer.use_bias, layer.bias) == (K, N, False, None)
    assert (layer.param_dtype, layer.precision, layer.bits) == (jnp.bfloat16, "highest", 2)
    assert layer.implementation == "xla"


def test_from_linear_shares_nothing():
    original = linear()
    layer = QuantLinear.from_linear(original)
    before = np.asarray(layer.bias[...])
    original.bias[...] = jnp.zeros(N)
    np.testing.assert_array_equal(layer.bias[...], before)


def test_state_is_split_by_type():
    layer = QuantLinear.from_linear(linear(), group_size=GROUP)
    graph, kernel, params = nnx.split(layer, QuantizedKernel, nnx.Param)
    assert set(kernel) == {"packed", "scale", "zero"}
    assert set(params) == {"bias"}
    assert_equal(nnx.state(nnx.merge(graph, kernel, params)), nnx.state(layer))


def test_gradients(rng):
    layer = QuantLinear.from_linear(linear(), group_size=GROUP)
    x, ct = inputs(rng, 3), jnp.asarray(rng.standard_normal((3, N)), jnp.float32)

    @nnx.jit
    def gradients(layer, x):
        return nnx.grad(lambda layer, x: jnp.vdot(layer(x), ct), argnums=(0, 1))(layer, x)

    params, dx = gradients(layer, x)
    p, ct = problem(layer, x), np.asarray(ct, np.float64)
    assert_close(dx, ct @ p.weight(), np.abs(ct) @ p.weight_magnitude(), N, dtype=jnp.float32)
    assert set(params) == {"bias"}
    assert_close(params["bias"][...], ct.sum(0), np.abs(ct).sum(0), 3, dtype=jnp.float32)


def test_training_moves_only_the_bias(rng):
    layer = QuantLinear.from_linear(linear(), group_size=GROUP)
    before = jax.tree.map(np.asarray, nnx.state(layer))
    optimizer = nnx.Optimizer(layer, optax.adamw(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        grads = nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)
        optimizer.update(layer, grads)

    step(layer, optimizer, inputs(rng, 3))
    after = nnx.state(layer)
    for name in ("packed", "scale", "zero"):
        assert_equal(after[name], before[name])
    assert np.all(np.asarray(after["bias"][...]) != np.asarray(before["bias"][...]))


def square(key):
    return QuantLinear(K, K, group_size=GROUP, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(key))


def keys():
    return jax.random.split(jax.random.key(0), 3)


def entry(layers, i):
    """Layer i of a stack."""
    graph, state = nnx.split(layers)
    return nnx.merge(graph, jax.tree.map(lambda a: a[i], state))


def test_vmap_over_layers(rng):
    layers = nnx.vmap(square)(keys())
    assert layers.kernel.shape == (3, K, K)
    x = inputs(rng, 3, 2)
    y = nnx.vmap(lambda layer, x: layer(x))(layers, x)
    for i in range(3):
        assert_answers(y[i], entry(layers, i), x[i])


def test_scan_over_layers(rng):
    layers = nnx.vmap(square)(keys())

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x, layer):
        y = layer(x)
        return y, y

    x = inputs(rng, 2)
    _, ys = run(x, layers)
    for i in range(3):
        assert_answers(ys[i], entry(layers, i), ys[i - 1] if i else x)


def test_from_stacked_linears(rng):
    stack = nnx.vmap(lambda key: nnx.Linear(K, N, rngs=nnx.Rngs(key)))(keys())
    layers = QuantLinear.from_linear(stack, group_size=GROUP)
    assert_equal(layers.kernel.tensor, quantize(stack.kernel[...], in_axis=-2, group_size=GROUP))
    assert layers.bias[...].shape == (3, N)


@pytest.mark.parametrize(
    ("format", "arrays"),
    [
        ("nvfp4", {"packed", "scale", "codebook", "global_scale"}),
        ("fp8", {"packed", "scale"}),  # 70 bytes a row are no whole words
    ],
)
def test_formats(rng, format, arrays):
    """From a layer, through split and merge, and from a stack: the arrays alone make the weight again."""
    original = linear()
    layer = QuantLinear.from_linear(original, format=format)
    assert set(nnx.to_pure_dict(nnx.state(layer, QuantizedKernel))) == arrays
    w = quantize(original.kernel[...], format=format, in_axis=0)
    assert (layer.bits, layer.group_size) == (w.bits, 16 if format == "nvfp4" else None)
    assert_equal(layer.kernel.tensor, w)
    x = inputs(rng, 2)
    merged = nnx.merge(*nnx.split(layer))
    assert_equal(merged(x), gemv(x, w, bias=original.bias[...]))

    stack = nnx.vmap(lambda key: nnx.Linear(K, N, rngs=nnx.Rngs(key)))(keys())
    layers = QuantLinear.from_linear(stack, format=format)
    assert_equal(layers.kernel.tensor, quantize(stack.kernel[...], in_axis=-2, format=format))
    ys = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x)
    assert_equal(ys[2], gemv(x, layers.kernel.tensor[2], bias=stack.bias[2]))


def test_method():
    original = linear()
    for method in ("mse", "minmax"):
        layer = QuantLinear.from_linear(original, bits=3, group_size=GROUP, method=method)
        expected = quantize(original.kernel[...], bits=3, group_size=GROUP, method=method, in_axis=0)
        assert layer.method == method
        assert_equal(layer.kernel.tensor, expected)


def test_axis_names_of_a_codebook():
    """A table has no rows."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
    layer = QuantLinear(K, N, kernel_init=init, format="nf4", rngs=nnx.Rngs(0))
    assert axis_names(layer.scale) == ("mlp", "embed")
    assert axis_names(layer.codebook) == (None,)


def test_state_round_trip(rng):
    layer = QuantLinear.from_linear(linear(dtype=jnp.bfloat16), group_size=GROUP)
    saved = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    assert set(saved) == {"packed", "scale", "zero", "bias"}
    blank = nnx.eval_shape(
        lambda: QuantLinear(K, N, param_dtype=jnp.bfloat16, group_size=GROUP, rngs=nnx.Rngs(1))
    )
    graph, state = nnx.split(blank)
    nnx.replace_by_pure_dict(state, saved)
    restored = nnx.merge(graph, state)
    x = inputs(rng, 2)
    assert_equal(restored(x), layer(x))


def test_imported_kernel_with_an_offset(rng):
    layer = QuantLinear.from_linear(linear(), group_size=GROUP)
    layer.offset = QuantizedKernel(-layer.zero[...] * layer.scale[...])
    layer.zero = None
    x = inputs(rng, 2)
    assert_answers(layer(x), layer, x)
    assert set(nnx.state(layer, QuantizedKernel)) == {"packed", "scale", "offset"}


def axis_names(variable):
    """By the name that this version of Flax gives them."""
    metadata = variable.get_metadata()
    return tuple(metadata.get("out_sharding") or metadata.get("sharding_names"))


def test_axis_names_pass_to_the_arrays():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
    layer = QuantLinear(K, N, kernel_init=init, group_size=GROUP, rngs=nnx.Rngs(0))
    for variable in (layer.packed, layer.scale, layer.zero):
        assert axis_names(variable) == ("mlp", "embed")
    layer = QuantLinear.from_linear(linear(kernel_init=init), group_size=None)
    assert axis_names(layer.packed) == ("mlp", "embed")
    assert axis_names(layer.scale) == ("mlp",)


def test_metadata_of_kernel_and_bias():
    metadata = {"kernel_metadata": {"note": "kernel"}, "bias_metadata": {"note": "bias"}}
    layer = QuantLinear(K, N, rngs=nnx.Rngs(0), **metadata)
    assert layer.packed.get_metadata()["note"] == layer.scale.get_metadata()["note"] == "kernel"
    assert layer.bias.get_metadata()["note"] == "bias"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "high"}, "QuantLinear: precision must be None, DEFAULT or HIGHEST; got 'high'"),
        ({"dot_general": print}, "QuantLinear: dot_general must be the default, dot_general"),
        ({"promote_dtype": print}, "QuantLinear: promote_dtype must be the default, promote_dtype"),
        ({"bits": 0}, "quantize: bits must be an integer from 1 to 8; got 0"),
        ({"format": "fp8", "bits": 4}, "quantize: bits must be 8 for format='fp8'; got 4"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        QuantLinear(K, N, rngs=nnx.Rngs(0), **arguments)


def test_from_linear_refuses():
    with pytest.raises(TypeError, match=r"from_linear: linear must be a flax\.nnx\.Linear; got LayerNorm"):
        QuantLinear.from_linear(nnx.LayerNorm(K, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"flax\.nnx\.Linear; got LoRALinear"):
        QuantLinear.from_linear(nnx.LoRALinear(K, N, lora_rank=2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="dot_general must be the default"):
        QuantLinear.from_linear(linear(dot_general=print))


def test_call_refuses(rng):
    layer = QuantLinear.from_linear(linear())
    with pytest.raises(
        ValueError, match=r"gemv: w\.packed must have shape \(N, 8\) for x with K = 64; got \(24, 9\)"
    ):
        layer(jnp.ones((2, 64)))
    with pytest.raises(ValueError, match=r"gemv: x must have shape \(\.\.\., 70\)"):
        layer(jnp.ones((2, K + 1)))
    with pytest.raises(
        ValueError, match="gemv: out_sharding must be None for operands without Explicit mesh axes"
    ):
        layer(inputs(rng, 2), out_sharding=jax.sharding.PartitionSpec())


def test_out_sharding(on_cpu, rng):
    """As flax.nnx.Linear has it, on a mesh with Explicit axes."""
    mesh = mesh_of(AxisType.Explicit)
    layer = QuantLinear.from_linear(linear(), group_size=GROUP)
    x = inputs(rng, 4)
    expected = layer(x)
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda a: put(a, mesh), state))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: layer(x, out_sharding=P("data", "model")))(put(x, mesh))
    assert spec_of(y) == ("data", "model")
    np.testing.assert_array_equal(y, expected)
