// The streaming kernel for 4 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int4() { return kStreamIntegers<4>; }

}  // namespace jaxgemv::cuda
