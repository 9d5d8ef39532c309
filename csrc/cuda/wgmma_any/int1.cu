// The wgmma_any kernel for 1 bit. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int1() { return kWgmmaAnyRows<Format::kAffine, 1>; }

}  // namespace jaxgemv::cuda
