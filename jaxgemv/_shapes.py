"""Two things to mind about shapes: JAX may be asked to refuse different ranks, and jax.export leaves sizes open."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import jax

_F = TypeVar("_F", bound=Callable[..., Any])


def known(size) -> int | None:
    """A size, or None for a symbolic one: jax.export makes one program for all sizes, small and large."""
    return size if isinstance(size, int) else None


def any_rank(f: _F) -> _F:
    """f, in which arrays of different ranks meet on purpose, also with `jax_numpy_rank_promotion="raise"`."""

    @wraps(f)
    def with_any_rank(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"):
            return f(*args, **kwargs)

    return cast(_F, with_any_rank)
