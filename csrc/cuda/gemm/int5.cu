// The gemm kernel for 5 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_int5() { return kGemmRows<Format::kAffine, 5>; }

}  // namespace jaxgemv::cuda
