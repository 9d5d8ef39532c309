// The gemm_tma kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_float8() {
  static constexpr auto kRows =
      join(kGemmTmaRows<Format::kE4M3, 8>, kGemmTmaRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
