// The wgmma_tma kernel for 7 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int7() { return kWgmmaTmaRows<Format::kAffine, 7>; }

}  // namespace jaxgemv::cuda
