// The wgmma_any kernel for tables of 16, which it holds to 2^-14: not for float32.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_table4() { return kWgmmaAnyPairs<Format::kCodebook, 4>; }

}  // namespace jaxgemv::cuda
