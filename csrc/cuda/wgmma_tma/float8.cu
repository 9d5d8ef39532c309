// The wgmma_tma kernel for float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_float8() { return float8_rows_of<WgmmaTma>(); }

}  // namespace jaxgemv::cuda
