// The gemm_tma kernel for 6 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int6() { return kGemmTmaRows<Format::kAffine, 6>; }

}  // namespace jaxgemv::cuda
