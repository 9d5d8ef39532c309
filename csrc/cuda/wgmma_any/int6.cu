// The wgmma_any kernel for 6 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int6() { return kWgmmaAnyRows<Format::kAffine, 6>; }

}  // namespace jaxgemv::cuda
