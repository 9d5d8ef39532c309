// The wgmma_any kernel for 7 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int7() { return kWgmmaAnyRows<Format::kAffine, 7>; }

}  // namespace jaxgemv::cuda
