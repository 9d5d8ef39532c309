"""Einsum equations of x and a kernel, as one product over the kernel's matrix."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemv.flax._kernel import Kernel, Layout, dot_general


class Equation(NamedTuple):
    """The labels of each axis; "." stands for an ellipsis, in x and the result alone."""

    x: str
    kernel: str
    out: str

    @classmethod
    def read(cls, op: str, text: str, kernel_ndim: int) -> "Equation":
        """Raises ValueError where this is no equation of two operands, NotImplementedError where it is no product."""
        plain = text.replace(" ", "")
        operands, arrow, out = plain.partition("->")
        x, comma, kernel = operands.partition(",")
        if not arrow or not comma or "," in kernel:
            raise ValueError(f"{op}: einsum_str must be like 'x,kernel->result'; got {text!r}")
        if len(kernel) != kernel_ndim and "." not in kernel:
            raise ValueError(f"{op}: einsum_str must have {kernel_ndim} labels for the kernel; got {text!r}")
        e = cls(x.replace("...", "."), kernel, out.replace("...", "."))
        if unknown := set(e.out) - set(e.x) - set(e.kernel):
            raise ValueError(
                f"{op}: einsum_str must have labels of its operands in the result; got {unknown}"
            )
        repeated = any(len(set(labels)) < len(labels) for labels in e)
        alone = set(e.kernel) - set(e.x) - set(e.out)
        if repeated or alone or "." in e.kernel or ("." in e.x) != ("." in e.out) or not e.summed:
            raise NotImplementedError(
                f"{op}: einsum_str must be a sum of products over axes of x and the kernel, each label once in an "
                f"operand, no ellipsis in the kernel; got {text!r}"
            )
        return e

    @property
    def summed(self) -> str:
        return "".join(c for c in self.kernel if c in self.x and c not in self.out)

    def layout(self, sizes: tuple[int, ...]) -> Layout:
        batch = tuple(i for i, c in enumerate(self.kernel) if c in self.x and c in self.out)
        return Layout(tuple(sizes), tuple(self.kernel.index(c) for c in self.summed), batch)


def einsum(op: str, equation: Equation, x: Array, kernel: Kernel, *, out_sharding=None, **options) -> Array:
    """`jnp.einsum` of the equation. options: as in `dot_general`."""
    ellipsis = x.ndim - len(equation.x.replace(".", ""))
    if ellipsis < 0 or (ellipsis and "." not in equation.x):
        raise ValueError(f"{op}: x must have {len(equation.x)} axes, {equation.x!r}; got shape {x.shape}")

    def labels(text: str) -> list:
        return [label for c in text for label in (range(ellipsis) if c == "." else c)]

    of_x, out, of_kernel = labels(equation.x), labels(equation.out), list(equation.kernel)
    alone = [i for i, c in enumerate(of_x) if c not in out and c not in of_kernel]
    if alone:
        x = jnp.sum(x, axis=alone)
        of_x = [c for i, c in enumerate(of_x) if i not in alone]
    batch = [c for c in of_kernel if c in of_x and c in out]
    have = [*batch, *(c for c in of_x if c not in of_kernel)]
    have += [c for c in of_kernel if c not in of_x]

    def axes(labels, of) -> list[int]:
        return [of.index(c) for c in labels]

    summed = equation.summed
    numbers = (
        (axes(summed, of_x), axes(summed, of_kernel)),
        (axes(batch, of_x), axes(batch, of_kernel)),
    )
    if out_sharding is not None:
        spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
        spec = PartitionSpec(*(spec[i] if i < len(spec) else None for i in axes(have, out)))
        is_named = isinstance(out_sharding, NamedSharding)
        out_sharding = NamedSharding(out_sharding.mesh, spec) if is_named else spec
    y = dot_general(op, x, kernel, numbers, out_sharding=out_sharding, **options)
    return jnp.transpose(y, axes(out, have))
