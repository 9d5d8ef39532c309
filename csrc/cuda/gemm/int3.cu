// The gemm kernel for 3 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_int3() { return kGemmRows<Format::kAffine, 3>; }

}  // namespace jaxgemv::cuda
