// The gemm_tma kernel for 7 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int7() { return kGemmTmaRows<Format::kAffine, 7>; }

}  // namespace jaxgemv::cuda
