// The mma_any kernel for 6 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_int6() { return kMmaAnyRows<Format::kAffine, 6>; }

}  // namespace jaxgemv::cuda
