// The wgmma_any kernel for 8 bits. A file a width, so that they compile side by
// side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int8() { return kWgmmaAnyRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
