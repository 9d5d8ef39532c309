// The gemm_tma kernel for 1 to 4 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_int1() { return kGemmTmaRows<Format::kAffine, 1>; }
Rows gemm_tma_int2() { return kGemmTmaRows<Format::kAffine, 2>; }
Rows gemm_tma_int3() { return kGemmTmaRows<Format::kAffine, 3>; }
Rows gemm_tma_int4() { return kGemmTmaRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
