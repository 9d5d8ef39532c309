// The wgmma_tma kernel for 8 bits.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int8() { return kWgmmaTmaRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
