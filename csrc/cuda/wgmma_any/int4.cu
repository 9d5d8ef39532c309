// The wgmma_any kernel for 4 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int4() { return kWgmmaAnyRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
