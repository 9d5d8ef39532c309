// The wgmma_tma kernel for float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_float8() {
  static constexpr auto kRows =
      join(kWgmmaTmaRows<Format::kE4M3, 8>, kWgmmaTmaRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
