// The mma_any kernel for tables of 16. A file a format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_table4() { return rows_of<MmaAny, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
