// The gemm kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_float8() { return float8_rows_of<Gemm>(); }

}  // namespace jaxgemv::cuda
