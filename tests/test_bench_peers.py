"""What other libraries make of a product in the benchmark is the product with the weight that they say they have."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="no MLX for this platform")

from bench import host_systems

SYSTEMS = [s for s in host_systems.systems(None) if s.name == "mlx"]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.format)
def test_mlx(system, rng):
    x, weight = rng.standard_normal((2, 256), np.float32), rng.standard_normal((48, 256), np.float32)
    nbytes, copies, run, y, dense = system.make(x, weight, lambda nbytes: 3, "float32")
    run()
    assert copies == 3
    assert nbytes < weight.nbytes / 3
    np.testing.assert_allclose(y(), x @ dense.T, atol=1e-4)
    assert np.abs(dense - weight).mean() < 0.15
