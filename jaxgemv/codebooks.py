"""Tables of the values that codes stand for, to be a weight's `codebook`: read-only float32 arrays.

Of shape (16,), the value of code q at index q:

- NF4: NormalFloat of QLoRA (Dettmers et al., 2023, appendix E), as bitsandbytes has it.
- FP4: bitsandbytes' own 4-bit float, in which a sixteenth of a twelfth is the smallest value. Its largest is 1.
- E2M1: the 4-bit float of OCP's Microscaling Formats (MX) 1.0, table 5; code 8 is -0. MXFP4 and NVFP4 are made of it.
- IQ4_NL: `kvalues_iq4nl` of ggml, integers from -127 to 113.

Of shape (256,), for codes of 8 bits, though `QuantizedTensor` takes arrays of these dtypes without a table:

- E4M3, E5M2: the values of float8_e4m3fn (which has NaN but no infinities) and float8_e5m2, by ml_dtypes.

>>> from jaxgemv import codebooks
>>> codebooks.E2M1[:8].tolist()
[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""

import jax.numpy as jnp
import numpy as np


def _table(values) -> np.ndarray:
    table = np.asarray(values, np.float32)
    table.flags.writeable = False
    return table


def _signed(magnitudes) -> np.ndarray:
    """Eight values, then the same with a minus."""
    return _table(np.multiply.outer([1, -1], magnitudes).ravel())


def _of_dtype(dtype) -> np.ndarray:
    return _table(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32))


# fmt: off
NF4 = _table([
    -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
])
# fmt: on
FP4 = _signed(np.array([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12)
E2M1 = _signed([0, 0.5, 1, 1.5, 2, 3, 4, 6])
IQ4_NL = _table([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E4M3 = _of_dtype(jnp.float8_e4m3fn)
E5M2 = _of_dtype(jnp.float8_e5m2)
