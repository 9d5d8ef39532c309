"""vmap of vmap of everything: each choice of operands in the outer and in the inner one, against a loop in Python."""

import re
from itertools import product

import jax
import numpy as np
import pytest
from kernels import compiled
from problems import Case, make

from jaxgemv import QuantizedTensor, gemv
from jaxgemv._primitive import gemv_p

OUTER, INNER, STACK = 2, 3, 4
CASE = Case(2, 6, 40, 8, "zero", bias=True)
ARRAYS = ("x", "packed", "scale", "zero", "bias")
INDEXED = (*ARRAYS, "index")
ALONE = [{"x"}, {"packed"}, {"scale"}, {"index"}]  # arrays of the weight share all rules
TOGETHER = [{"x", "scale"}, {"packed", "scale", "zero"}, set(INDEXED)]


def operands(rng, indexed: bool, outer: set, inner: set) -> dict[str, np.ndarray]:
    """Each with the dimensions over which it is mapped in front: outer, then inner, then a stack's."""
    lead = {
        name: (OUTER,) * (name in outer) + (INNER,) * (name in inner) + (STACK,) * (indexed and name != "x")
        for name in ARRAYS
    }
    made = {}
    for name, shape in lead.items():
        # Of a problem each, so that no two entries are the same.
        entries = [make(rng, 4, "float32", CASE, exact=True) for _ in range(int(np.prod(shape)))]
        made[name] = np.stack([getattr(p, name) for p in entries]).reshape(
            *shape, *getattr(entries[0], name).shape
        )
    if indexed:
        shape = (OUTER,) * ("index" in outer) + (INNER,) * ("index" in inner)
        made["index"] = rng.integers(-1, STACK + 1, (*shape, CASE.m)).astype(np.int32)
    return made


def call(operands, implementation):
    fields = {name: operands[name] for name in ("packed", "scale", "zero")}
    w = QuantizedTensor(**fields, bits=4)
    x, bias, index = operands["x"], operands["bias"], operands.get("index")
    return gemv(x, w, bias=bias, index=index, implementation=implementation)


def moved(operands, outer: set, inner: set, rng) -> tuple[dict, dict, dict]:
    """The mapped dimensions somewhere else, and where: (operands, in_axes of the outer vmap, of the inner)."""
    made, outer_axes, inner_axes = {}, {}, {}
    for name, a in operands.items():
        ndim = a.ndim
        if name in inner:
            inside = ndim - (name in outer)
            inner_axes[name] = int(rng.integers(-inside, inside))
            a = np.moveaxis(a, int(name in outer), inner_axes[name] % inside + (name in outer))
        else:
            inner_axes[name] = None
        if name in outer:
            outer_axes[name] = int(rng.integers(-ndim, ndim))
            a = np.moveaxis(a, 0, outer_axes[name])
        else:
            outer_axes[name] = None
        made[name] = a
    return made, outer_axes, inner_axes


def choices():
    """Each operand alone in the outer vmap and each in the inner, and the same of groups; with an index and without."""
    for outer, inner in (*product(ALONE, ALONE), *zip(TOGETHER, [*TOGETHER[1:], TOGETHER[0]])):
        yield True, outer, inner
        if outer - {"index"} and inner - {"index"}:
            yield False, outer - {"index"}, inner - {"index"}


def name_of(value) -> str:
    if isinstance(value, bool):
        return "index" if value else "plain"
    return "+".join(name for name in INDEXED if name in value)


@compiled
@pytest.mark.parametrize(("indexed", "outer", "inner"), [*choices()], ids=name_of)
def test_nested(backend, indexed, outer, inner, rng):
    plain = operands(rng, indexed, outer, inner)
    args, outer_axes, inner_axes = moved(plain, outer, inner, rng)
    f = jax.vmap(
        jax.vmap(lambda operands: call(operands, backend), (inner_axes,), out_axes=1),
        (outer_axes,),
        out_axes=-1,
    )
    y = np.moveaxis(np.asarray(jax.jit(f)(args)), (-1, 1), (0, 1))
    assert y.shape == (OUTER, INNER, CASE.m, CASE.n)
    # One call, and no loop around it.
    program = str(jax.make_jaxpr(f)(args))
    assert len(re.findall(rf" {gemv_p.name}\[", program)) == 1
    assert not re.search(r" (scan|while)\[", program)
    for i, j in np.ndindex(OUTER, INNER):
        alone = {name: a[(i,) * (name in outer) + (j,) * (name in inner)] for name, a in plain.items()}
        np.testing.assert_array_equal(y[i, j], call(alone, "xla"))
