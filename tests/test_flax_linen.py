"""`QuantDense` against `nn.Dense`, and against the float64 answer from the bytes of its kernel."""

import importlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, serialization
from problems import Problem
from tolerance import assert_close, assert_equal

from jaxgemv import QuantizedTensor, gemv, quantize
from jaxgemv.flax.linen import QuantDense

K, N, GROUP = 70, 24, 32  # neither words nor groups come out even


def dense(rng, use_bias=True, dtype=jnp.float32, **fields):
    """An nn.Dense and its variables, with a bias that is not zero."""
    layer = nn.Dense(N, use_bias=use_bias, param_dtype=dtype, **fields)
    params = {"kernel": jnp.asarray(rng.standard_normal((K, N)), dtype)}
    if use_bias:
        params["bias"] = jnp.asarray(rng.standard_normal(N), dtype)
    return layer, {"params": params}


def inputs(rng, *lead, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal((*lead, K)), dtype)


def problem(layer, variables, x):
    """The same product from the layer's arrays alone."""
    kernel = jax.tree.map(np.asarray, variables["quant"]["kernel"])
    bias = variables["params"]["bias"] if layer.use_bias else None
    group = min(layer.group_size or K, K)
    return Problem(
        x=x,
        packed=kernel["packed"],
        scale=kernel["scale"],
        zero=kernel.get("zero"),
        offset=None,
        bias=bias,
        bits=layer.bits,
        group=group,
    )


def assert_answers(y, layer, variables, x, dtype=jnp.float32):
    p = problem(layer, variables, x)
    assert_close(y, p.answer(), p.magnitude(), K, dtype=dtype)


@pytest.mark.parametrize(("bits", "group_size"), [(1, GROUP), (3, None), (4, 128), (4, None), (8, GROUP)])
def test_answer(rng, bits, group_size):
    layer, variables = QuantDense.from_dense(*dense(rng), bits=bits, group_size=group_size)
    x = inputs(rng, 3)
    assert_answers(layer.apply(variables, x), layer, variables, x)


@pytest.mark.parametrize(
    ("lead", "use_bias", "symmetric"),
    [((), True, False), ((), False, True), ((3,), True, True), ((2, 5), True, False), ((2, 5), False, False)],
)
def test_answer_of_any_rank(rng, lead, use_bias, symmetric):
    options = {"group_size": GROUP, "symmetric": symmetric}
    layer, variables = QuantDense.from_dense(*dense(rng, use_bias), **options)
    x = inputs(rng, *lead)
    assert ("zero" in variables["quant"]["kernel"]) != symmetric
    assert_answers(layer.apply(variables, x), layer, variables, x)
    assert_answers(jax.jit(layer.apply)(variables, x), layer, variables, x)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("param_dtype", "dtype"),
    [("float32", None), ("float16", None), ("float32", "bfloat16"), ("bfloat16", "float32")],
)
def test_dtypes_as_in_dense(rng, x_dtype, param_dtype, dtype):
    original, variables = dense(rng, dtype=param_dtype)
    original = original.clone(dtype=dtype)
    x = (3 * inputs(rng, 2)).astype(x_dtype)
    layer, quantised = QuantDense.from_dense(original, variables, group_size=GROUP)
    expected = jax.eval_shape(original.apply, variables, x).dtype
    assert_answers(layer.apply(quantised, x), layer, quantised, x.astype(expected), expected)


def test_scale_dtype_is_the_dtype_of_the_kernel(rng):
    original, variables = dense(rng, use_bias=False)
    layer, variables = QuantDense.from_dense(original, variables, group_size=GROUP, scale_dtype=jnp.bfloat16)
    x = inputs(rng, 2, dtype=jnp.bfloat16)
    assert variables["quant"]["kernel"]["scale"].dtype == jnp.bfloat16
    assert_answers(layer.apply(variables, x), layer, variables, x, jnp.bfloat16)


def test_same_as_dense_on_the_dequantised_kernel(rng):
    original, variables = dense(rng, precision="highest")
    layer, quantised = QuantDense.from_dense(original, variables, group_size=GROUP)
    w = QuantizedTensor(**quantised["quant"]["kernel"], bits=4, group_size=GROUP, k=K)
    x = inputs(rng, 4)
    y = original.apply({"params": quantised["params"] | {"kernel": w.dequantize().T}}, x)
    exact = np.asarray(layer.apply(quantised, x), np.float64)
    assert_close(y, exact, problem(layer, quantised, x).magnitude(), K, dtype=jnp.float32, factor=2)


def test_init_quantises_what_dense_would_have(rng):
    key, x = jax.random.key(0), inputs(rng, 2)
    original = nn.Dense(N, bias_init=nn.initializers.normal())
    layer, expected = QuantDense.from_dense(original, original.init(key, x), bits=3, group_size=GROUP)
    assert_equal(layer.init(key, x), expected)
    abstract = jax.eval_shape(layer.init, key, x)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, expected)


def test_from_dense_keeps_the_fields(rng):
    original, variables = dense(rng, use_bias=False, dtype=jnp.bfloat16, precision="highest", name="head")
    variables["batch_stats"] = {"mean": jnp.zeros(3)}
    layer, variables = QuantDense.from_dense(original, variables, bits=2, implementation="xla")
    assert (layer.features, layer.use_bias, layer.name, layer.precision) == (N, False, "head", "highest")
    assert (layer.param_dtype, layer.bits, layer.implementation) == (jnp.bfloat16, 2, "xla")
    assert set(variables) == {"quant", "batch_stats"}


def test_gradients(rng):
    layer, variables = QuantDense.from_dense(*dense(rng), group_size=GROUP)
    x, ct = inputs(rng, 3), jnp.asarray(rng.standard_normal((3, N)), jnp.float32)

    def loss(params, x):
        return jnp.vdot(layer.apply(variables | {"params": params}, x), ct)

    params, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], x)
    p, ct = problem(layer, variables, x), np.asarray(ct, np.float64)
    assert_close(dx, ct @ p.weight(), np.abs(ct) @ p.weight_magnitude(), N, dtype=jnp.float32)
    assert set(params) == {"bias"}
    assert_close(params["bias"], ct.sum(0), np.abs(ct).sum(0), 3, dtype=jnp.float32)


def test_training_moves_only_the_bias(rng):
    layer, variables = QuantDense.from_dense(*dense(rng), group_size=GROUP)
    x = inputs(rng, 3)
    optimizer = optax.adamw(0.1)
    state = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, state):
        def loss(params):
            y, updated = layer.apply(variables | {"params": params}, x, mutable=["quant"])
            return jnp.square(y).sum(), updated

        grads, updated = jax.grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state, variables["params"])
        return {"params": optax.apply_updates(variables["params"], updates)} | updated, state

    trained, state = step(variables, state)
    assert_equal(trained["quant"], variables["quant"])
    assert np.all(trained["params"]["bias"] != variables["params"]["bias"])


class Body(nn.Module):
    """A layer in the shape that nn.scan wants, which also returns what it computes."""

    layer: type[nn.Module]
    options: tuple = ()

    @nn.compact
    def __call__(self, x, _):
        y = self.layer(K, name="dense", **dict(self.options))(x)
        return y, y


def test_scan_over_layers(rng):
    x, key, length = inputs(rng, 2), jax.random.key(1), 3
    axes = {"variable_axes": {"params": 0, "quant": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(Body, **axes, length=length)
    scanned = stack(QuantDense, (("group_size", GROUP),))
    params = stack(nn.Dense).init(key, x, None)["params"]["dense"]
    layer, variables = QuantDense.from_dense(nn.Dense(K), {"params": params}, group_size=GROUP)
    nested = {name: {"dense": collection} for name, collection in variables.items()}
    assert jax.tree.map(jnp.shape, scanned.init(key, x, None)) == jax.tree.map(jnp.shape, nested)

    _, ys = jax.jit(scanned.apply)(nested, x, None)
    for i in range(length):
        one = jax.tree.map(lambda a, i=i: a[i], variables)
        assert_answers(ys[i], layer, one, ys[i - 1] if i else x)


def test_vmap_over_layers(rng):
    x, key, count = inputs(rng, 3, 2), jax.random.key(1), 3
    mapped = nn.vmap(
        QuantDense, variable_axes={"params": 0, "quant": 0}, split_rngs={"params": True}, axis_size=count
    )
    layer = mapped(N, group_size=GROUP)
    variables = layer.init(key, x)
    assert variables["quant"]["kernel"]["packed"].shape[:2] == (count, N)
    y = layer.apply(variables, x)
    for i in range(count):
        one = jax.tree.map(lambda a, i=i: a[i], variables)
        assert_answers(y[i], QuantDense(N, group_size=GROUP), one, x[i])


def test_serialisation_round_trip(rng):
    layer, variables = QuantDense.from_dense(*dense(rng, dtype=jnp.bfloat16), group_size=GROUP)
    data = serialization.to_bytes(variables)
    blank = layer.init(jax.random.key(3), inputs(rng, 1))
    assert_equal(serialization.from_bytes(blank, data), variables)
    restored = serialization.msgpack_restore(data)
    assert_equal(restored, variables)
    x = inputs(rng, 2)
    assert_equal(layer.apply(restored, x), layer.apply(variables, x))


def test_imported_kernel_with_an_offset(rng):
    kernel = {
        "packed": jnp.asarray(rng.integers(0, 2**32, (N, 9), dtype=np.uint32)),
        "scale": jnp.asarray(rng.standard_normal((N, 3)), jnp.float32),
        "offset": jnp.asarray(rng.standard_normal((N, 3)), jnp.float32),
    }
    x = inputs(rng, 2)
    y = QuantDense(N, use_bias=False, group_size=GROUP).apply({"quant": {"kernel": kernel}}, x)
    p = Problem(x=x, zero=None, bias=None, bits=4, group=GROUP, **kernel)
    assert_close(y, p.answer(), p.magnitude(), K, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("format", "arrays"),
    [
        ("nvfp4", {"packed", "scale", "codebook", "global_scale"}),
        ("fp8", {"packed", "scale"}),  # 70 bytes a row are no whole words
    ],
)
def test_formats(rng, format, arrays):
    """From a layer, from init, and a stack under nn.scan: the variables alone make the weight again."""
    original, variables = dense(rng)
    layer, quantised = QuantDense.from_dense(original, variables, format=format)
    kernel = quantised["quant"]["kernel"]
    assert set(kernel) == arrays
    w = quantize(variables["params"]["kernel"], format=format, in_axis=0)
    assert (layer.bits, layer.group_size) == (w.bits, 16 if format == "nvfp4" else None)
    x = inputs(rng, 2)
    expected = gemv(x, w, bias=variables["params"]["bias"])
    assert expected.dtype == jnp.float32
    assert_equal(layer.apply(quantised, x), expected)
    assert_equal(layer.clone().apply(quantised, x), expected)

    blank = QuantDense(N, format=format)
    assert jax.tree.map(jnp.shape, blank.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, quantised)

    axes = {"variable_axes": {"params": 0, "quant": 0}, "split_rngs": {"params": True}}
    stack = jnp.asarray(rng.standard_normal((3, K, K)), jnp.float32)
    layer, variables = QuantDense.from_dense(
        nn.Dense(K, use_bias=False), {"params": {"kernel": stack}}, format=format
    )
    scanned = nn.scan(Body, **axes, length=3)(QuantDense, (("format", format), ("use_bias", False)))
    _, ys = scanned.apply({"quant": {"dense": variables["quant"]}}, x, None)
    assert_equal(ys[0], gemv(x, quantize(stack[0], format=format, in_axis=0)))
    assert_equal(ys[2], gemv(ys[1], quantize(stack[2], format=format, in_axis=0)))


def test_method(rng):
    original, variables = dense(rng)
    for method in ("mse", "minmax"):
        layer, quantised = QuantDense.from_dense(original, variables, bits=3, group_size=GROUP, method=method)
        w = quantize(variables["params"]["kernel"], bits=3, group_size=GROUP, method=method, in_axis=0)
        assert layer.method == method
        assert_equal(quantised["quant"]["kernel"], {"packed": w.packed, "scale": w.scale, "zero": w.zero})


def test_axis_names_of_a_codebook(rng):
    """A table has no rows; what stacks the kernel stacks it."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layer = QuantDense(N, kernel_init=init, format="nvfp4")
    specs = nn.get_partition_spec(layer.init(jax.random.key(0), inputs(rng, 1)))["quant"]["kernel"]
    spec = jax.sharding.PartitionSpec
    assert specs == {
        "packed": spec("mlp", "embed"),
        "scale": spec("mlp", "embed"),
        "codebook": spec(None),
        "global_scale": spec(),
    }


@pytest.mark.parametrize("annotate", [nn.with_partitioning, nn.with_logical_partitioning])
def test_axis_names_pass_to_the_arrays(rng, annotate):
    init = annotate(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layer = QuantDense(N, kernel_init=init, group_size=GROUP)
    variables = layer.init(jax.random.key(0), inputs(rng, 1))
    spec = jax.sharding.PartitionSpec("mlp", "embed")
    expected = {"packed": spec, "scale": spec, "zero": spec}
    assert nn.get_partition_spec(variables)["quant"]["kernel"] == expected
    x = inputs(rng, 2)
    plain = nn.meta.unbox(variables)
    assert_equal(layer.apply(variables, x), layer.apply(plain, x))
    row = QuantDense(N, kernel_init=init, group_size=None).init(jax.random.key(0), x)
    assert row["quant"]["kernel"]["scale"].names == ("mlp",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "high"}, "QuantDense: precision must be None, DEFAULT or HIGHEST; got 'high'"),
        ({"precision": ("highest", "high")}, "precision must be None, DEFAULT or HIGHEST"),
        (
            {"precision": jax.lax.DotAlgorithmPreset.TF32_TF32_F32},
            "precision must be None, DEFAULT or HIGHEST",
        ),
        ({"dot_general": jax.lax.dot_general}, "QuantDense: dot_general must be None"),
        ({"dot_general_cls": object}, "QuantDense: dot_general_cls must be None"),
        ({"promote_dtype": print}, "QuantDense: promote_dtype must be the default, promote_dtype"),
        ({"bits": 9}, "quantize: bits must be an integer from 1 to 8; got 9"),
        ({"format": "nf4", "bits": 8}, "quantize: bits must be 4 for format='nf4'; got 8"),
        ({"method": "best"}, "quantize: method must be 'mse' or 'minmax'; got 'best'"),
    ],
)
def test_refused_fields(rng, fields, message):
    with pytest.raises(ValueError, match=message):
        QuantDense(N, **fields).init(jax.random.key(0), inputs(rng, 1))


@pytest.mark.parametrize("precision", ["default", "highest", jax.lax.Precision.HIGHEST, ("highest", None)])
def test_accepted_precision(rng, precision):
    QuantDense(N, precision=precision).init(jax.random.key(0), inputs(rng, 1))


class Gated(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return nn.sigmoid(super().__call__(inputs))


def test_from_dense_refuses(rng):
    original, variables = dense(rng)
    with pytest.raises(TypeError, match=r"from_dense: dense must be a flax\.linen\.Dense; got Conv"):
        QuantDense.from_dense(nn.Conv(3, (3,)), variables)
    with pytest.raises(TypeError, match=r"flax\.linen\.Dense; got Gated"):
        QuantDense.from_dense(Gated(N), variables)
    with pytest.raises(ValueError, match="dot_general must be None"):
        QuantDense.from_dense(original.clone(dot_general=jax.lax.dot_general), variables)


def test_apply_refuses(rng):
    layer, variables = QuantDense.from_dense(*dense(rng))
    with pytest.raises(
        ValueError, match=r"gemv: w\.packed must have shape \(N, 8\) for x with K = 64; got \(24, 9\)"
    ):
        layer.apply(variables, jnp.ones((2, 64)))
    with pytest.raises(errors.ScopeCollectionNotFound, match='"kernel" from collection "quant"'):
        layer.apply({"params": variables["params"]}, inputs(rng, 2))


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_without_flax(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, f"jaxgemv.flax.{name}", raising=False)
    importlib.import_module("jaxgemv.flax")
    with pytest.raises(
        ImportError, match=rf'jaxgemv\.flax\.{name} needs Flax: pip install "jaxgemv\[flax\]"'
    ):
        importlib.import_module(f"jaxgemv.flax.{name}")


def test_variables_of_other_features():
    variables = QuantDense(64, use_bias=False).init(jax.random.key(0), jnp.ones((2, 32)))
    with pytest.raises(ValueError, match="QuantDense: kernel must have 32 features; got variables of 64"):
        QuantDense(32, use_bias=False).apply(variables, jnp.ones((2, 32)))
