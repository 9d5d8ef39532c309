// The wgmma_tma kernel for 3 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int3() { return kWgmmaTmaRows<Format::kAffine, 3>; }

}  // namespace jaxgemv::cuda
