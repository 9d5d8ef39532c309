// The direct kernel for weights of float8. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows direct_float8() {
  static constexpr auto kRows = join(kDirectRows<Format::kE4M3, 8>, kDirectRows<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
