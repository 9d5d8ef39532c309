// The wgmma_any kernel for 5 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int5() { return kWgmmaAnyRows<Format::kAffine, 5>; }

}  // namespace jaxgemv::cuda
