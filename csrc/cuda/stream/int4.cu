// The streaming kernel for 4 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int4() { return rows_of<Stream, Format::kAffine, 4>(); }

}  // namespace jaxgemv::cuda
