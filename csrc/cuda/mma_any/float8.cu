// The mma_any kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_float8() {
  static constexpr auto kRows = join(kMmaAnyRows<Format::kE4M3, 8>, kMmaAnyRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
