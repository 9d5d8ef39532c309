// The gemm_tma kernel for 2 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int2() { return kGemmTmaRows<Format::kAffine, 2>; }

}  // namespace jaxgemv::cuda
