// The streaming kernel for 8 bits. A file a width, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_int8() { return rows_of<Stream, Format::kAffine, 8>(); }

}  // namespace jaxgemv::cuda
