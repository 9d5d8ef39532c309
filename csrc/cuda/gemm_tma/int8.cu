// The gemm_tma kernel for 8 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int8() { return kGemmTmaRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
