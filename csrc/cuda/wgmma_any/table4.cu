// The wgmma_any kernel for tables of 16.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_table4() { return rows_of<WgmmaAny, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
