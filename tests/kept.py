"""A program of each version of the custom call, kept for ever: what was exported once must run with all later ones.

    python tests/kept.py        # writes data/gemv_v1.mlirbc and data/gemv_v1.npz

Made once, with jax 0.8.0 (the oldest that we support) and both backends built, and never again: a new version of the
call gets files of its own beside these. What is kept is StableHLO, which XLA reads for five years and more; files of
jax.export, which are StableHLO inside, JAX itself refuses after half a year.
"""

import dataclasses
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from problems import Case, make

from jaxgemv import EXPORT_CHECKS, QuantizedTensor, gemv
from jaxgemv._ffi import backends

DATA = Path(__file__).parent / "data"
ROWS, STACK = 7, 3
CASE = Case(ROWS, 24, 128, 32, "zero", bias=True)
EXPERT = Case(ROWS, 24, 128, "row", "offset")


def program(x, packed, scale, zero, bias, experts, expert_scale, expert_offset, ids):
    """Every operand of the call, present and absent: a product with zero and bias, and one by index with an offset."""
    w = QuantizedTensor(packed=packed, scale=scale, zero=zero, bits=4)
    stack = QuantizedTensor(packed=experts, scale=expert_scale, offset=expert_offset, bits=3)
    y = gemv(x, w, bias=bias)
    return y, gemv(x.astype(jnp.bfloat16), stack, index=ids, out_dtype=jnp.float32)


def example() -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Arguments and results, which are exact."""
    rng = np.random.default_rng(0)
    p = make(rng, 4, "float32", CASE, exact=True)
    experts = [make(rng, 3, "float32", EXPERT, exact=True) for _ in range(STACK)]
    ids = np.array([0, 2, 1, -1, 2, STACK, 0], np.int32)
    args = {name: getattr(p, name) for name in ("x", "packed", "scale", "zero", "bias")}
    args["experts"] = np.stack([e.packed for e in experts])
    args["expert_scale"] = np.stack([e.scale for e in experts])
    args["expert_offset"] = np.stack([e.offset for e in experts])
    args["ids"] = ids
    chosen = [
        row @ experts[i].weight().T if 0 <= i < STACK else np.full(CASE.n, np.nan) for i, row in zip(ids, p.x)
    ]
    return args, (np.float32(p.answer()), np.float32(chosen))


def export(args: dict[str, np.ndarray]) -> jax.export.Exported:
    """By this version, for any number of rows."""
    (b,) = jax.export.symbolic_shape("b")
    symbolic = {"x": (b, CASE.k), "ids": (b,)}
    specs = [jax.ShapeDtypeStruct(symbolic.get(name, a.shape), a.dtype) for name, a in args.items()]
    f = jax.export.export(jax.jit(program), platforms=("cpu", "cuda", "tpu"), disabled_checks=EXPORT_CHECKS)
    return f(*specs)


def load(name: str) -> tuple[jax.export.Exported, dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The program that was kept, with what JAX would write around it today; arguments; results."""
    arrays = dict(np.load(DATA / f"{name}.npz"))
    results = arrays.pop("y"), arrays.pop("chosen")
    code = (DATA / f"{name}.mlirbc").read_bytes()
    return dataclasses.replace(export(arrays), mlir_module_serialized=code), arrays, results


def main() -> None:
    missing = {name: backend.missing for name, backend in backends.items() if backend.missing}
    if missing:
        raise SystemExit(f"without its kernels a platform's part would be the reference: {missing}")
    # StableHLO says where each line comes from; not from which machine.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    args, (y, chosen) = example()
    DATA.mkdir(exist_ok=True)
    (DATA / "gemv_v1.mlirbc").write_bytes(export(args).mlir_module_serialized)
    np.savez_compressed(DATA / "gemv_v1.npz", **args, y=y, chosen=chosen)


if __name__ == "__main__":
    main()
