"""A program of each version of each custom call, kept for ever: what was exported once must run with all later ones.

    python tests/kept.py NAME       # writes data/NAME.mlirbc and data/NAME.npz

Made once, with jax 0.8.0 (the oldest that we support) and both backends built, and never again: a new version of a call
gets files of its own beside these. What is kept is StableHLO, which XLA reads for five years and more; files of
jax.export, which are StableHLO inside, JAX itself refuses after half a year.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from problems import Case, Problem, make

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, gemv
from jaxgemv._ffi import backends

DATA = Path(__file__).parent / "data"
ROWS, STACK = 7, 3
CASE = Case(ROWS, 24, 128, 32, "zero", bias=True)
EXPERT = Case(ROWS, 24, 128, "row", "offset")


def _weights(packed, scale, zero, experts, expert_scale, expert_offset) -> tuple[QuantizedTensor, ...]:
    w = QuantizedTensor(packed=packed, scale=scale, zero=zero, bits=4)
    return w, QuantizedTensor(packed=experts, scale=expert_scale, offset=expert_offset, bits=3)


def products(x, ids, bias, *weights):
    """Every operand of the call, present and absent: a product with zero and bias, and one by index with an offset."""
    w, stack = _weights(*weights)
    y = gemv(x, w, bias=bias)
    return y, gemv(x.astype(jnp.bfloat16), stack, index=ids, out_dtype=jnp.float32)


def gradients(ct, ids, *weights):
    """The same of the transposed call."""
    w, stack = _weights(*weights)
    x = jax.ShapeDtypeStruct((ct.shape[0], CASE.k), ct.dtype)
    (dx,) = jax.linear_transpose(lambda x: gemv(x, w), x)(ct)
    (dx_experts,) = jax.linear_transpose(lambda x: gemv(x, stack, index=ids), x)(ct)
    return dx, dx_experts


PROGRAMS = {"gemv_v1": products, "gemv_transposed_v1": gradients}


def example(name: str) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Arguments, those of any number of rows first, and results, which are exact."""
    rng = np.random.default_rng(0)
    p = make(rng, 4, "float32", CASE, exact=True)
    experts = [make(rng, 3, "float32", EXPERT, exact=True) for _ in range(STACK)]
    ids = np.array([0, 2, 1, -1, 2, STACK, 0], np.int32)
    weights = {name: getattr(p, name) for name in ("packed", "scale", "zero")}
    weights["experts"] = np.stack([e.packed for e in experts])
    weights["expert_scale"] = np.stack([e.scale for e in experts])
    weights["expert_offset"] = np.stack([e.offset for e in experts])

    def chosen(rows, weight, bad):
        return np.float32([row @ weight(experts[i]) if 0 <= i < STACK else bad for i, row in zip(ids, rows)])

    if name == "gemv_v1":
        args = {"x": p.x, "ids": ids, "bias": p.bias} | weights
        return args, (np.float32(p.answer()), chosen(p.x, lambda e: e.weight().T, np.full(CASE.n, np.nan)))
    ct = rng.integers(-2, 3, (ROWS, CASE.n)).astype(np.float32)
    args = {"ct": ct, "ids": ids} | weights
    return args, (np.float32(ct @ p.weight()), chosen(ct, Problem.weight, np.zeros(CASE.k)))


def export(name: str, args: dict[str, np.ndarray]) -> jax.export.Exported:
    """By this version, for any number of rows."""
    (b,) = jax.export.symbolic_shape("b")
    shapes = [(b, *a.shape[1:]) if i < 2 else a.shape for i, a in enumerate(args.values())]
    specs = map(jax.ShapeDtypeStruct, shapes, (a.dtype for a in args.values()))
    f = jax.jit(PROGRAMS[name])
    return jax.export.export(f, platforms=("cpu", "cuda", "tpu"), disabled_checks=EXPORT_CHECKS)(*specs)


def load(name: str) -> tuple[jax.export.Exported, list[np.ndarray], list[np.ndarray]]:
    """The program that was kept, with what JAX would write around it today; arguments; results."""
    args = dict(np.load(DATA / f"{name}.npz"))
    results = [args.pop(f"result{i}") for i in range(2)]
    code = (DATA / f"{name}.mlirbc").read_bytes()
    exported = dataclasses.replace(export(name, args), mlir_module_serialized=code)
    return exported, [*args.values()], results


def main(name: str) -> None:
    missing = {name: backend.missing for name, backend in backends.items() if backend.missing}
    if missing:
        raise SystemExit(f"without its kernels a platform's part would be the reference: {missing}")
    # StableHLO says where each line comes from; not from which machine.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    args, results = example(name)
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.mlirbc").write_bytes(export(name, args).mlir_module_serialized)
    np.savez_compressed(DATA / f"{name}.npz", **args, result0=results[0], result1=results[1])


if __name__ == "__main__":
    main(sys.argv[1])
