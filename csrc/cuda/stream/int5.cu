// The streaming kernel for 5 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int5() { return rows_of<Stream, Format::kAffine, 5>(); }

}  // namespace jaxgemv::cuda
