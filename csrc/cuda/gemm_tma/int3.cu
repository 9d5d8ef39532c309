// The gemm_tma kernel for 3 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int3() { return kGemmTmaRows<Format::kAffine, 3>; }

}  // namespace jaxgemv::cuda
