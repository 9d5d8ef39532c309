// The direct kernel for tables of 16. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows direct_table4() { return rows_of<Direct, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
