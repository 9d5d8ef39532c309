"""Programs that other versions exported run with this one; backcompat.py says how they are made."""

import backcompat
import numpy as np
import pytest
from kernels import compiled

from jaxgemv._ffi import backends

PLATFORMS = ("cpu", "cuda", "tpu")


def check(file, platforms, times: int) -> None:
    exported, (x, ct, ids, *others), results = backcompat.load(file, platforms)
    kernels = [name for name in platforms if name in backends and not backends[name].missing]
    assert exported.mlir_module().count(f"@{file.stem}(") == 4 * len(kernels)
    ys = exported.call(*(np.concatenate([a] * times) for a in (x, ct, ids)), *others)
    for y, expected in zip(ys, results):
        np.testing.assert_array_equal(y, np.concatenate([expected] * times))


@compiled
@pytest.mark.parametrize("times", [1, 2, 10])
def test_this_version(backend, times, tmp_path):
    """By the way that kept programs go: to StableHLO in a file, and back into a program of today's JAX."""
    backcompat.write(tmp_path, PLATFORMS)
    check(*tmp_path.glob("*.mlirbc"), PLATFORMS, times)


@compiled
@pytest.mark.parametrize("file", sorted(backcompat.DATA.glob("*.mlirbc")), ids=lambda file: file.stem)
@pytest.mark.parametrize("times", [1, 10])
def test_released_versions(backend, file, times):
    check(file, PLATFORMS, times)
