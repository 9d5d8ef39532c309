// The streaming kernel for 2 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int2() { return kStreamNarrow<Format::kAffine, 2>; }

}  // namespace jaxgemv::cuda
