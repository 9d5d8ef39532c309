"""Quantised `flax.nnx` layers, and `quantize_model`, which puts them into a model."""

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError('jaxgemv.flax.nnx needs Flax: pip install "jaxgemv[flax]"') from error

from jaxgemv.flax._nnx.base import QuantizedKernel
from jaxgemv.flax._nnx.einsum import QuantEinsum
from jaxgemv.flax._nnx.embed import QuantEmbed
from jaxgemv.flax._nnx.linear import QuantLinear
from jaxgemv.flax._nnx.model import quantize_model

del nnx
__all__ = ["QuantEinsum", "QuantEmbed", "QuantLinear", "QuantizedKernel", "quantize_model"]
