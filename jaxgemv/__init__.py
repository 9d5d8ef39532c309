"""Low-bit matrix-vector products for JAX, at the speed at which memory delivers the weights."""

from jaxgemv import _extensions as _extensions  # first: says what to do where nothing has been built
from jaxgemv import codebooks as codebooks
from jaxgemv import reference as reference
from jaxgemv._activations import quantize_activations as quantize_activations
from jaxgemv._config import EXPORT_CHECKS as EXPORT_CHECKS
from jaxgemv._config import __version__ as __version__
from jaxgemv._config import show_config as show_config
from jaxgemv._format import pack as pack
from jaxgemv._format import unpack as unpack
from jaxgemv._ops import gemv as gemv
from jaxgemv._ops import gemv_int1 as gemv_int1
from jaxgemv._ops import gemv_int2 as gemv_int2
from jaxgemv._ops import gemv_int3 as gemv_int3
from jaxgemv._ops import gemv_int4 as gemv_int4
from jaxgemv._ops import gemv_int5 as gemv_int5
from jaxgemv._ops import gemv_int6 as gemv_int6
from jaxgemv._ops import gemv_int7 as gemv_int7
from jaxgemv._ops import gemv_int8 as gemv_int8
from jaxgemv._quantize import quantize as quantize
from jaxgemv._tensor import QuantizedTensor as QuantizedTensor
from jaxgemv._tensor import dequantize as dequantize
from jaxgemv._tree import quantize_tree as quantize_tree
