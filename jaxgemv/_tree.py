"""`quantize_tree`: the matrices of a model, leaf by leaf."""

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import lcm, prod
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgemv._quantize import quantize
from jaxgemv._tensor import ARRAYS, QuantizedTensor

_OP = "quantize_tree"
_NAMES = "kernel", "weight", "w"
_LEAST_K = 64  # with fewer input features codes may be as large as what they stand for
ALREADY = "is quantised already"

Predicate = Callable[[str, Any], bool | Mapping[str, Any]]
# (arguments of `quantize`, or None to keep the leaf; why)
Choice = tuple[Mapping[str, Any] | None, str]
# From the path of the largest matrix that was kept, and why, to the end of a warning that nothing is quantised.
Hint = Callable[[str, str], str]


def say_why(name: str, why: str) -> str:
    return f": {name!r} {why}. report=print tells what became of each leaf, and why"


class Record(NamedTuple):
    """What became of a leaf, and why. before, after: bytes."""

    path: str
    what: str  # the new weight's bits and shape, or "kept"
    why: str
    before: int
    after: int


def quantize_tree(
    tree: Any,
    *,
    in_axis: int,
    predicate: Predicate | None = None,
    donate: bool = False,
    report: Callable[[Record], Any] | None = None,
    **quantize_arguments: Any,
) -> Any:
    """A pytree of the same structure in which each matrix is a `QuantizedTensor`.

    - tree: any pytree of arrays; tensors that are quantised already stay as they are.
    - in_axis: which axis of a matrix is K, the input features: 0 for Flax kernels (in, out), -1 for (out, in), -2 where
      kernels have stack dimensions in front.
    - predicate: (path, array) to whether the leaf is quantised, or to a dict of arguments for it in place of those
      below; the path is like "layers/0/mlp/kernel". By default float arrays of two dimensions and more whose path ends
      in kernel, weight or w, behind a "/" or, in a flat dict, a ".", and of which in_axis is one of the last two.
      Chosen embeddings (V, D) want `{"in_axis": -1}`, so that `w[ids]` is rows of them.
    - donate: deletes each leaf once its codes are there, so that memory never holds more than the tree and one leaf;
      one that is several leaves with the last of them, if all are quantised.
    - report: called with a record for each leaf: its `path`, `what` became of it, `why`, bytes `before` and `after`.
    - quantize_arguments: of `jaxgemv.quantize`.

    One leaf at a time, with a progress bar where `rich` is installed and stderr is a terminal. Leaves with a
    NamedSharding stay sharded, along K as far as each part is whole words and groups. A `jax.ShapeDtypeStruct` becomes
    a weight of these, without shardings: what a saved model is restored into. Raises what `quantize` raises,
    with the path of the leaf, and TypeError for an argument that `quantize` does not have or a tree without arrays.
    Warns if there are matrices and no name is one of the three: give a predicate, or a `report`, which says so too.

    >>> import jax.numpy as jnp, jaxgemv
    >>> params = {"up": {"kernel": jnp.ones((256, 64)), "bias": jnp.zeros(64)}}
    >>> small = jaxgemv.quantize_tree(params, in_axis=0, report=lambda r: print(r.path, r.what, r.before, r.after))
    up/bias kept 256 256
    up/kernel 4 bits, 64x256 65536 9216
    >>> small["up"]["kernel"].shape
    (64, 256)
    """
    check_arguments(f"{_OP}: ", quantize_arguments)
    check_functions(_OP, predicate=predicate, report=report)
    if not isinstance(in_axis, Integral) or isinstance(in_axis, bool):
        raise ValueError(f"{_OP}: in_axis must be an axis of each matrix; got {in_axis!r}")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantized)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]

    def make(name: str, leaf, arguments: Mapping[str, Any]) -> QuantizedTensor:
        check_arguments("", arguments)
        arguments = {"in_axis": in_axis} | quantize_arguments | dict(arguments)
        return quantized(leaf, arguments)

    def chosen(name: str, leaf) -> Choice:
        return choice(_OP, name, leaf, predicate, default)

    def default(name: str, leaf) -> Choice:
        arguments, why = _by_name(name, leaf)
        if arguments is not None and in_axis in (*range(leaf.ndim - 2), *range(-leaf.ndim, -2)):
            return None, f"has {leaf.ndim} dimensions, and in_axis={in_axis} is not one of the last two"
        k = leaf.shape[in_axis] if -leaf.ndim <= in_axis < leaf.ndim else _LEAST_K
        if arguments is not None and k < _LEAST_K:
            with suppress(TypeError, ValueError):  # which come again, with the path
                after = make(name, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
                if _nbytes(after) >= _nbytes(leaf):
                    return None, f"would be no smaller: its input features, in_axis={in_axis}, are {k}"
        return arguments, why

    if named and not any(
        hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for _, leaf in named
    ):
        mapping = "; pass dict(tree)" * isinstance(named[0][1], Mapping)
        raise TypeError(f"{_OP}: tree must have arrays; got {type(named[0][1]).__name__}{mapping}")
    hint = _say_names if predicate is None else None
    return structure.unflatten(converted(_OP, named, chosen, make, donate=donate, report=report, hint=hint))


def check_arguments(prefix: str, arguments: Mapping[str, Any]) -> None:
    known = list(inspect.signature(quantize).parameters)[1:]
    if unknown := [name for name in arguments if name not in known]:
        raise TypeError(f"{prefix}arguments must be those of quantize, {', '.join(known)}; got {unknown[0]}")


def check_functions(op: str, **functions: Any) -> None:
    for name, f in functions.items():
        if f is not None and not callable(f):
            raise TypeError(f"{op}: {name} must be a function or None; got {f!r}")


def converted(
    op: str,
    leaves: list[tuple[str, Any]],
    chosen: Callable[[str, Any], Choice],
    make: Callable[[str, Any, Mapping[str, Any]], Any],
    *,
    donate: bool,
    report: Callable[[Record], Any] | None,
    hint: Hint | None,
) -> list:
    """What `make` makes of each leaf that `chosen` has arguments for, and the others. donate: deletes what was made
    into another, but not as long as it is another leaf too. hint: makes the text of a warning when there are matrices
    and none was chosen; None, or a report, means no warning."""
    uses = Counter(id(leaf) for _, leaf in leaves)
    made, kept = [], []
    for name, leaf in _with_progress(leaves):
        arguments, why = chosen(name, leaf)
        if arguments is None and (_is_matrix(name, leaf) or why == ALREADY):
            kept.append((_nbytes(leaf), name, why))
        new = leaf
        if arguments is not None:
            try:
                new = make(name, leaf, arguments)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{op}: {name}: {error}") from error
        record = Record(name, _what(new, leaf), why, _nbytes(leaf), _nbytes(new))
        is_array = isinstance(leaf, Array) and not isinstance(leaf, Tracer)
        uses[id(leaf)] -= new is not leaf
        if donate and is_array and not uses[id(leaf)]:
            jax.block_until_ready(new)
            leaf.delete()
        made.append(new)
        if report is not None:
            report(record)
    is_any = any(map(_is_quantized, made)) or any(why == ALREADY for *_, why in kept)
    if hint is not None and report is None and kept and not is_any:
        _, name, why = max(kept)
        warnings.warn(f"{op}: nothing is quantised{hint(name, why)}", stacklevel=3)
    return made


def _is_quantized(leaf) -> bool:
    return isinstance(leaf, QuantizedTensor)


def choice(
    op: str, name: str, leaf, predicate: Predicate | None, default: Callable[[str, Any], Choice]
) -> Choice:
    """What the predicate, or without one the default, says of a leaf that can be quantised."""
    if _is_quantized(leaf):
        return None, ALREADY
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return None, "is no float array"
    if leaf.ndim < 2:
        return None, f"has {leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"
    if 0 in leaf.shape:
        return None, "is empty"
    if predicate is None:
        return default(name, leaf)
    chosen = predicate(name, leaf)
    if isinstance(chosen, Mapping):
        return chosen, "predicate gave arguments"
    if not isinstance(chosen, bool | np.bool_):
        raise TypeError(f"{op}: predicate must give a bool or a dict for {name}; got {chosen!r}")
    return ({}, "predicate") if chosen else (None, "predicate")


def _by_name(name: str, leaf) -> Choice:
    last = re.split("[/.]", name)[-1]  # also of a flat dict, as safetensors has it
    return ({}, f"ends in {last}") if last in _NAMES else (None, f"ends in {last}, not {', '.join(_NAMES)}")


def _say_names(name: str, why: str) -> str:
    if re.split("[/.]", name)[-1] in _NAMES:
        return say_why(name, why)
    return (
        f", since no path ends in {', '.join(_NAMES)}; got {name!r}. "
        "predicate=lambda path, array: True takes all matrices; embeddings (V, D) want {'in_axis': -1}"
    )


def _is_matrix(name: str, leaf) -> bool:
    return choice(_OP, name, leaf, None, lambda *_: ({}, ""))[0] is not None


def quantized(leaf, arguments: Mapping[str, Any]) -> QuantizedTensor:
    """`quantize`, with arrays that are cut as the leaf is; of a leaf that is a shape, shapes."""

    def cut(spec, ndim: int) -> tuple:
        spec = [*spec, *(None,) * (ndim - len(spec))]
        k = spec.pop(arguments["in_axis"])
        return (*spec, k)

    return of_array(leaf, lambda leaf: quantize(leaf, **arguments), cut)


def of_array(
    leaf, make: Callable[[Any], QuantizedTensor], cut: Callable[[Any, int], tuple]
) -> QuantizedTensor:
    """`make(leaf)`, cut as the leaf, along K as far as each part is whole words and groups; shapes of a shape.

    cut: (spec, dimensions) of the leaf to what cuts (..., N, K).
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(make, leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer) or not isinstance(sharding, NamedSharding):
        return make(leaf)
    mesh = sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        # With Explicit axes each step would have to say how its result is cut.
        auto = Mesh(
            np.asarray(mesh.devices), mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
        with jax.set_mesh(auto):
            w = make(jax.device_put(leaf, NamedSharding(auto, sharding.spec)))
    else:
        w = make(leaf)
    *lead, n, k = cut(sharding.spec, leaf.ndim)
    k = _evenly(k, w, mesh)

    def place(name: str, a: Array) -> Array:
        spec = (*lead, n, k) if name not in ("codebook", "perm", "global_scale") else lead
        spec = [each if size % _size(each, mesh) == 0 else None for each, size in zip(spec, a.shape)]
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))

    arrays = {name: place(name, a) for name in ARRAYS if (a := getattr(w, name)) is not None}
    return QuantizedTensor(**arrays, bits=w.bits, group_size=w.group_size, k=w.k)


def _size(axes, mesh) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return prod(mesh.shape[name] for name in names)


def _evenly(axes, w: QuantizedTensor, mesh):
    """The axes that cut K, if each part is whole words and groups."""
    assert w.scale is not None
    k, groups = w.shape[-1], w.scale.shape[-1] if w.scale.ndim == w.ndim else 1
    unit = lcm(32, w.group_size or k // groups if groups > 1 else 1)
    return axes if k % (unit * _size(axes, mesh)) == 0 else None


def _what(new, leaf) -> str:
    if new is leaf:
        return "kept"
    return f"{new.bits} bits, {'x'.join(map(str, new.shape))}"


def _nbytes(leaf) -> int:
    return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(leaf) if hasattr(a, "dtype"))


def _with_progress(leaves: list) -> Iterable:
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        return leaves
    console = Console(stderr=True)
    return track(leaves, "quantising", console=console, transient=True, disable=not console.is_terminal)
