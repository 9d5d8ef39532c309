"""Which way a call of gemv_p is lowered, on one platform; _primitive.py has how each of them goes."""

from enum import Enum, auto

from jaxgemv import _around, _dispatch, _many_rows
from jaxgemv._operands import Operands, Static


class Way(Enum):
    # These bind gemv_p again, for less.
    NARROW_X = auto()  # in the dtype that x had before it was widened
    PARTS_AROUND = auto()  # without the parts, which go around it
    FLOAT_X = auto()  # integer x as floats, where only these have a kernel
    PARTITIONED = auto()  # for what each device holds
    # These are the product.
    KERNEL = auto()
    MANY_ROWS = auto()
    LOOP = auto()
    REFERENCE = auto()


def way(platform: str | None, obstacle: str | None, partitioned: bool, o: Operands, s: Static) -> Way:
    """o: shapes and dtypes. platform: None for one without kernels. obstacle: to kernels, if any. partitioned: whether
    the compiler cuts the call over devices.

    Raises NotImplementedError for a named implementation that cannot run.
    """
    if s.dtype_before_widening is not None:
        return Way.NARROW_X
    reason = _dispatch.why_reference(platform, obstacle, o, s)
    kernel = None if reason else platform
    many = not kernel and _many_rows.takes(o, s)
    if _around.has_parts(o, s):
        # A global scale goes into the weight that many rows meet.
        inside = many or (kernel and not o.is_nothing and _dispatch.fuses(kernel, o, s))
        if partitioned or not inside:
            return Way.PARTS_AROUND
    if kernel and not _dispatch.kernels_for(kernel, o, s):
        return Way.FLOAT_X
    if partitioned:
        return Way.PARTITIONED
    if o.is_nothing:
        return Way.REFERENCE  # NaN; a kernel would read an entry
    if kernel:
        return Way.KERNEL
    if many:
        return Way.MANY_ROWS
    return Way.LOOP if _dispatch.loops(platform, o, s) else Way.REFERENCE
