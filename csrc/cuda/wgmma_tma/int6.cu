// The wgmma_tma kernel for 6 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int6() { return kWgmmaTmaRows<Format::kAffine, 6>; }

}  // namespace jaxgemv::cuda
