// The gemm_tma kernel for 4 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int4() { return kGemmTmaRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
