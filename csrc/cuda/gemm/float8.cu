// The gemm kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_float8() {
  static constexpr auto kRows = join(kGemmRows<Format::kE4M3, 8>, kGemmRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
