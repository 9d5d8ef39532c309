// The streaming kernel for 6 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int6() { return rows_of<Stream, Format::kAffine, 6>(); }

}  // namespace jaxgemv::cuda
