// The streaming kernel for 1 bit. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int1() { return kStreamNarrow<Format::kAffine, 1>; }

}  // namespace jaxgemv::cuda
