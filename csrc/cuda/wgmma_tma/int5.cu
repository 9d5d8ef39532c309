// The wgmma_tma kernel for 5 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int5() { return kWgmmaTmaRows<Format::kAffine, 5>; }

}  // namespace jaxgemv::cuda
