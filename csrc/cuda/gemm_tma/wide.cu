// The gemm_tma kernel for 5 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int5() { return kGemmTmaRows<Format::kAffine, 5>; }
Rows gemm_tma_int6() { return kGemmTmaRows<Format::kAffine, 6>; }
Rows gemm_tma_int7() { return kGemmTmaRows<Format::kAffine, 7>; }
Rows gemm_tma_int8() { return kGemmTmaRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
