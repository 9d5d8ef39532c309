"""Numbers of numpy where Python's are meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_equal

from jaxgemv import QuantizedTensor, gemv, pack, quantize, quantize_activations, unpack


def test_numbers_of_numpy(rng):
    """bits, group_size and k may be numpy's, as a file has them; a tensor has Python's, and is as any other."""
    weight = rng.standard_normal((5, 100)).astype(np.float32)
    four, thirty = np.int64(4), np.uint8(32)
    w, expected = quantize(weight, bits=four, group_size=thirty), quantize(weight, bits=4, group_size=32)
    assert_equal(w, expected)
    again = QuantizedTensor(
        packed=w.packed, scale=w.scale, zero=w.zero, bits=four, group_size=thirty, k=np.int32(100)
    )
    assert {type(n) for n in (again.bits, again.group_size, again.k)} == {int}
    assert jax.tree.structure(again) == jax.tree.structure(expected)
    x = jnp.ones(100)
    np.testing.assert_array_equal(gemv(x, again), gemv(x, expected))
    np.testing.assert_array_equal(unpack(pack(np.arange(8), four), four, 8), np.arange(8))
    np.testing.assert_array_equal(quantize_activations(x[:64], group_size=thirty)[1].shape, (2,))
    with pytest.raises(ValueError, match=r"quantize: bits must be an integer from 1 to 8; got np\.int64"):
        quantize(weight, bits=np.int64(9))
