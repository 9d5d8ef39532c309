"""Activations in 8 bits, as llama.cpp has them: x of a product as int8, with a scale for each 32 along K.

Against codes of up to 8 bits a CPU then multiplies integers. The answer is another one: x is rounded to 1/254 of the
largest of its group.
"""

import math

import jax.numpy as jnp
import model

from jaxgemv import QuantizedTensor, gemv, quantize_activations

GROUP = 32


def in_int8(exact):
    """A `linear` of model.py, with int8 x where kernels multiply codes with it; elsewhere `exact`, another `linear`."""

    def linear(x, w, *, norm=None, eps=1e-5, **parts):
        if not _has_integers(w):
            return exact(x, w, norm=norm, eps=eps, **parts)
        normed = x if norm is None else model.rms_norm(x, norm, eps)
        codes, scale = quantize_activations(normed, group_size=math.gcd(GROUP, x.shape[-1]))
        return gemv(codes, w, x_scale=scale, out_dtype=x.dtype, **parts)

    return linear


def _has_integers(w) -> bool:
    """Not a table of floats, nor float8."""
    return (
        isinstance(w, QuantizedTensor) and w.codebook is None and jnp.issubdtype(w.packed.dtype, jnp.integer)
    )
