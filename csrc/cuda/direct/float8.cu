// The direct kernel for weights of float8. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows direct_float8() { return float8_rows_of<Direct>(); }

}  // namespace jaxgemv::cuda
