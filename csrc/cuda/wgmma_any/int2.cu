// The wgmma_any kernel for 2 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int2() { return kWgmmaAnyRows<Format::kAffine, 2>; }

}  // namespace jaxgemv::cuda
