// The gemm kernel for 5 to 8 bits. Widths of one file are much alike, and compressed together; two
// files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_int5() { return kGemmRows<Format::kAffine, 5>; }
Rows gemm_int6() { return kGemmRows<Format::kAffine, 6>; }
Rows gemm_int7() { return kGemmRows<Format::kAffine, 7>; }
Rows gemm_int8() { return kGemmRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
