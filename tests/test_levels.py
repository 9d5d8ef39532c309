"""What only some kernels of the CPU do, at each level of instructions: many rows, each way in which x may be taken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Case, make
from tolerance import assert_close

from jaxgemv import gemv, gemv_int4
from jaxgemv._ffi import TARGET, backends, cpu_levels, set_cpu_level

LEVELS = cpu_levels()


def test_the_table_follows_the_level():
    """What lowering asks is the table of the level in use, and not that of the best one."""
    if "portable" not in LEVELS[1:]:
        pytest.skip("this processor has one level")

    def calls(rows):
        args = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((6, 8), jnp.uint32)
        text = (
            jax.jit(lambda x, w: gemv_int4(x, w, None, 1.0)).trace(*args).lower(lowering_platforms=("cpu",))
        )
        return text.as_text().count(f"@{TARGET}(")

    best = backends["cpu"].find(4, "float32")[0]
    set_cpu_level("portable")
    try:
        (kernel,) = backends["cpu"].find(4, "float32")
        assert (kernel.name, kernel.rows) == ("portable", 64)
        assert calls(best.rows) == (best.rows <= 64)
    finally:
        set_cpu_level(LEVELS[0])
    assert backends["cpu"].find(4, "float32") == [best]
    assert calls(best.rows) == 1
    with pytest.raises(ValueError, match="this processor has no level sse9"):
        set_cpu_level("sse9")


def check(p):
    y = gemv(p.x, p.tensor, bias=p.bias, out_dtype="float32", implementation="cpu")
    assert_close(y, p.answer(), p.magnitude(), p.k, dtype=jnp.float32)


# Tiles of columns hold 16: from one that is half empty to several that are not whole.
@pytest.mark.parametrize("m", [2, 3, 5, 8, 12, 17, 33, 65, 513])
@pytest.mark.parametrize("x", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_rows(level, bits, x, m, rng):
    check(make(rng, bits, x, Case(m, 75, 1100, 128, "zero", bias=True)))


@pytest.mark.parametrize("group", [16, 24, 32, 96, 192, 384, 1000, "row"])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.numerics
def test_groups(level, bits, m, group, rng):
    """Whole blocks of codes, parts of them, and neither."""
    check(make(rng, bits, "float32", Case(m, 70, 2100, group, "offset")))


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("extreme", [1e-30, 1e-12, 1e5, 1e30])
@pytest.mark.parametrize("m", [1, 8, 24])
def test_elements_too_different_for_integers(level, m, extreme, x, rng):
    """In one row of many, that one of several threads arranges."""
    p = make(rng, 4, x, Case(m, 64, 8192, 128, "zero"))
    values = p.x.copy()
    values[-1, 5000] = extreme
    check(dataclasses.replace(p, x=values))


@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1.0, 1e19, 1e25])
@pytest.mark.parametrize("m", [1, 8, 24])
def test_small_and_large_x(level, m, scale, rng):
    p = make(rng, 4, "float32", Case(m, 40, 1024, 128, "mid"))
    check(dataclasses.replace(p, x=(p.x * scale).astype(np.float32)))


def test_zeros_and_rows_of_zeros(level, rng):
    p = make(rng, 4, "float32", Case(24, 40, 1024, 128, "zero"), exact=True)
    values = p.x * (np.arange(24) % 3 > 0)[:, None]
    p = dataclasses.replace(p, x=values.astype(np.float32))
    y = gemv(p.x, p.tensor, out_dtype="float32", implementation="cpu")
    np.testing.assert_array_equal(y, p.answer())


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_slices_with_weights_of_their_own(level, x, rng):
    """Several slices of x, each arranged by itself."""
    p = make(rng, 4, x, Case(3 * 8, 40, 4096, 128, "zero"))
    stacked = [np.stack([a, a, a]) for a in (p.packed, p.scale, p.zero)]
    w = dataclasses.replace(p.tensor, packed=stacked[0], scale=stacked[1], zero=stacked[2])
    y = gemv(p.x.reshape(3, 8, -1), w, index=np.arange(3), out_dtype="float32", implementation="cpu")
    assert_close(y.reshape(24, -1), p.answer(), p.magnitude(), p.k, dtype=jnp.float32)
