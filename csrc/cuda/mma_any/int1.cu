// The mma_any kernel for 1 bit. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_int1() { return kMmaAnyRows<Format::kAffine, 1>; }

}  // namespace jaxgemv::cuda
