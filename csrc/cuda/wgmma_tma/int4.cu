// The wgmma_tma kernel for 4 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int4() { return kWgmmaTmaRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
