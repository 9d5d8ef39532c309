// The gemm kernel for 1 to 4 bits. Widths of one file are much alike, and compressed together; two
// files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_int1() { return kGemmRows<Format::kAffine, 1>; }
Rows gemm_int2() { return kGemmRows<Format::kAffine, 2>; }
Rows gemm_int3() { return kGemmRows<Format::kAffine, 3>; }
Rows gemm_int4() { return kGemmRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
