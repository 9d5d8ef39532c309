// The wgmma_any kernel for weights of float8. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_float8() {
  static constexpr auto kRows =
      join(kWgmmaAnyRows<Format::kE4M3, 8>, kWgmmaAnyRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
