"""examples/one_token.py gives what attention of one token is: interpreted, and compiled where there is a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")
pytestmark = pytest.mark.numerics

GPU = pytest.param(False, marks=pytest.mark.cuda, id="cuda")


@pytest.fixture(params=[pytest.param(True, id="interpreted"), GPU])
def interpret(request):
    return request.param


@pytest.fixture
def both(example, interpret):
    """f(config, size, position) -> what the kernel gives, and what it should: the heads', and the cache."""
    model, one_token = example("model"), example("one_token")

    def run(config, size, position, dtype=jnp.float32, window=0, norms=False, sequences=None):
        keys = iter(jax.random.split(jax.random.key(position), 8))
        lead = () if sequences is None else (sequences,)
        heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
        y = jax.random.normal(next(keys), (*lead, 1, heads + 2 * kv_heads, width), dtype)
        cache = tuple(jax.random.normal(next(keys), (*lead, kv_heads, size, width), dtype) for _ in "kv")
        of = tuple(1 + 0.1 * jax.random.normal(next(keys), (width,), dtype) for _ in "qk") if norms else ()
        positions = jnp.array([position])
        turn = model.rotation(positions, config.rope_theta, width)

        def result(attend, y, cache):
            def f(y, cache):
                return attend(y, of, cache, positions, turn, config, window)

            return jax.jit(f if sequences is None else jax.vmap(f))(y, cache)

        assert one_token.takes(cache)
        found = result(functools.partial(one_token.attend, interpret=interpret), y, cache)
        with jax.default_matmul_precision("highest"):
            exact = jax.tree.map(lambda a: a.astype(jnp.float32), (y, cache))
            wanted = result(model.attend_all, *exact)
        return found, wanted

    return example("model").Config, run


def check(found, wanted, dtype):
    """To the rounding of dtype, of values about 1 large, once for what is kept and once for what is given."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=16 * float(jnp.finfo(dtype).eps)
        )


ON_GPU = pytest.mark.cuda  # since interpreting takes seconds each


# By sums; by tensor cores in several splits; in as many as there can be, of a block each and of more.
@pytest.mark.parametrize("size", [48, 640, *(pytest.param(n, marks=ON_GPU) for n in (100, 1280, 4224, 9000))])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_positions(place, size, both):
    Config, run = both
    config = Config(n_heads=8, n_kv_heads=2, head_dim=64)
    position = {"first": 0, "middle": size // 2 + 3, "last": size - 1}[place]
    check(*run(config, size, position), jnp.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "size"),
    [
        (3, 1, 32, 256),
        (40, 2, 128, 1280),
        (4, 2, 256, 256),
        pytest.param(32, 8, 128, 256, marks=ON_GPU),
        pytest.param(4, 4, 64, 1280, marks=ON_GPU),
        pytest.param(32, 1, 256, 4224, marks=ON_GPU),
    ],
    ids=str,
)
def test_heads(heads, kv_heads, width, size, both):
    Config, run = both
    config = Config(n_heads=heads, n_kv_heads=kv_heads, head_dim=width)
    check(*run(config, size, 200, jnp.bfloat16), jnp.bfloat16)


@pytest.mark.parametrize("width", [128, 256])
def test_wide_heads_of_float32(width, both):
    """Which take the most shared memory."""
    Config, run = both
    check(*run(Config(n_heads=4, n_kv_heads=1, head_dim=width), 256, 200), jnp.float32)


@pytest.mark.parametrize("size", [256, 320, pytest.param(1280, marks=ON_GPU)])
@pytest.mark.parametrize(
    "otherwise",
    [
        {"norms": True},
        {"window": 70},
        {"window": 70, "norms": True, "sequences": 3},
        {"norms": True, "sequences": 64},
    ],
    ids=str,
)
def test_what_models_do_otherwise(otherwise, size, both):
    """Norms of q and k, a window, pairs side by side, scores divided by another root; a few sequences, and many."""
    Config, run = both
    config = Config(n_heads=4, n_kv_heads=2, head_dim=64, rope_interleaved=True, query_scalar=100.0)
    config = dataclasses.replace(config, sequences=otherwise.get("sequences", 1))
    check(*run(config, size, 201, **otherwise), jnp.float32)
