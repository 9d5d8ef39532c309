// The gemm kernel for 8 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_int8() { return kGemmRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
