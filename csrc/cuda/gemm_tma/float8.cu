// The gemm_tma kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_float8() { return float8_rows_of<GemmTma>(); }

}  // namespace jaxgemv::cuda
