// The direct kernel for integers of every width.
#include "launch.cuh"

namespace jaxgemv::cuda {

template <int kBits>
inline constexpr auto& kIntegerRows = kDirectRows<Format::kAffine, kBits>;

Rows direct_integers() {
  static constexpr auto kRows =
      join(kIntegerRows<1>, kIntegerRows<2>, kIntegerRows<3>, kIntegerRows<4>, kIntegerRows<5>,
           kIntegerRows<6>, kIntegerRows<7>, kIntegerRows<8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
