// The gemm_tma kernel for 1 bit. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int1() { return kGemmTmaRows<Format::kAffine, 1>; }

}  // namespace jaxgemv::cuda
