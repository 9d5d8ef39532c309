// The mma_any kernel for weights of float8.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_float8() { return float8_rows_of<MmaAny>(); }

}  // namespace jaxgemv::cuda
