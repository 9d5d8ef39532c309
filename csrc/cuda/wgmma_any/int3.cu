// The wgmma_any kernel for 3 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int3() { return kWgmmaAnyRows<Format::kAffine, 3>; }

}  // namespace jaxgemv::cuda
