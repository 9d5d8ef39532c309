// The streaming kernel for 3 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int3() { return rows_of<Stream, Format::kAffine, 3>(); }

}  // namespace jaxgemv::cuda
