// The streaming kernel for tables of 16. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_table4() { return rows_of<Stream, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
