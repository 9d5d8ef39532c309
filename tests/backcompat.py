"""What was exported once must run with all later versions: a program of each released version of the custom call.

    python tests/backcompat.py      # writes data/<target>.mlirbc and data/<target>.npz

To be run once for each target that a release brings (TARGET in _ffi.py; `jaxgemv_gemv_v1` when 0.1.0 is released),
with the oldest jax that we support and both backends built, and its files never changed again. Until then data/ is not
there, and the call may change. What is kept is StableHLO, which XLA reads for five years and more; files of
jax.export, which are StableHLO inside, JAX itself refuses after half a year.
"""

import dataclasses
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from problems import Case, Problem, make

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, gemv
from jaxgemv._ffi import TARGET, backends

DATA = Path(__file__).parent / "data"
ROWS, STACK = 7, 3
CASE = Case(ROWS, 24, 128, 32, "zero", bias=True)
EXPERT = Case(ROWS, 24, 128, "row", "offset")


def program(x, ct, ids, bias, packed, scale, zero, experts, expert_scale, expert_offset):
    """Every operand of the call, present and absent: products with zero and bias, and by index with an offset; and the
    gradients of both with respect to x."""
    w = QuantizedTensor(packed=packed, scale=scale, zero=zero, bits=4)
    stack = QuantizedTensor(packed=experts, scale=expert_scale, offset=expert_offset, bits=3)
    y = gemv(x, w, bias=bias)
    y_experts = gemv(x.astype(jnp.bfloat16), stack, index=ids, out_dtype=jnp.float32)
    (dx,) = jax.linear_transpose(lambda x: gemv(x, w), x)(ct)
    (dx_experts,) = jax.linear_transpose(lambda x: gemv(x, stack, index=ids), x)(ct)
    return y, y_experts, dx, dx_experts


def example() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Arguments, those of any number of rows first, and results, which are exact."""
    rng = np.random.default_rng(0)
    p = make(rng, 4, "float32", CASE, exact=True)
    experts = [make(rng, 3, "float32", EXPERT, exact=True) for _ in range(STACK)]
    ids = np.array([0, 2, 1, -1, 2, STACK, 0], np.int32)
    ct = rng.integers(-2, 3, (ROWS, CASE.n)).astype(np.float32)
    args = {"x": p.x, "ct": ct, "ids": ids, "bias": p.bias}
    args |= {name: getattr(p, name) for name in ("packed", "scale", "zero")}
    args["experts"] = np.stack([e.packed for e in experts])
    args["expert_scale"] = np.stack([e.scale for e in experts])
    args["expert_offset"] = np.stack([e.offset for e in experts])

    def chosen(rows, weight, bad):
        return [row @ weight(experts[i]) if 0 <= i < STACK else bad for i, row in zip(ids, rows)]

    y_experts = chosen(p.x, lambda e: e.weight().T, np.full(CASE.n, np.nan))
    dx_experts = chosen(ct, Problem.weight, np.zeros(CASE.k))
    return args, [np.float32(y) for y in (p.answer(), y_experts, ct @ p.weight(), dx_experts)]


def export(args: dict[str, np.ndarray], platforms) -> jax.export.Exported:
    """By this version, for any number of rows."""
    (b,) = jax.export.symbolic_shape("b")
    shapes = [(b, *a.shape[1:]) if i < 3 else a.shape for i, a in enumerate(args.values())]
    specs = map(jax.ShapeDtypeStruct, shapes, (a.dtype for a in args.values()))
    return jax.export.export(jax.jit(program), platforms=platforms, disabled_checks=EXPORT_CHECKS)(*specs)


def write(folder: Path, platforms) -> None:
    # StableHLO says where each line comes from; not from which machine.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    args, results = example()
    folder.mkdir(exist_ok=True)
    (folder / f"{TARGET}.mlirbc").write_bytes(export(args, platforms).mlir_module_serialized)
    named = {f"result{i}": y for i, y in enumerate(results)}
    np.savez_compressed(folder / f"{TARGET}.npz", **args, **named)


def load(file: Path, platforms) -> tuple[jax.export.Exported, list[np.ndarray], list[np.ndarray]]:
    """The program that was kept, with what JAX would write around it today; arguments; results."""
    args = dict(np.load(file.with_suffix(".npz")))
    results = [args.pop(f"result{i}") for i in range(4)]
    exported = dataclasses.replace(export(args, platforms), mlir_module_serialized=file.read_bytes())
    return exported, [*args.values()], results


if __name__ == "__main__":
    missing = {name: backend.missing for name, backend in backends.items() if backend.missing}
    if missing:
        raise SystemExit(f"without its kernels a platform's part would be the reference: {missing}")
    write(DATA, ("cpu", "cuda", "tpu"))
