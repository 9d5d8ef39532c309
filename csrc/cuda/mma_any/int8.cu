// The mma_any kernel for 8 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_int8() { return kMmaAnyRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
