// The gemm_tma kernel for 5 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int5() { return kGemmTmaRows<Format::kAffine, 5>; }

}  // namespace jaxgemv::cuda
