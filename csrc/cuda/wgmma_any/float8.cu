// The wgmma_any kernel for weights of float8. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_float8() { return float8_rows_of<WgmmaAny>(); }

}  // namespace jaxgemv::cuda
