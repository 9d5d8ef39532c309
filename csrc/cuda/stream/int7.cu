// The streaming kernel for 7 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int7() { return rows_of<Stream, Format::kAffine, 7>(); }

}  // namespace jaxgemv::cuda
