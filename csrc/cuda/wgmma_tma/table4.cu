// The wgmma_tma kernel for tables of 16.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_table4() { return rows_of<WgmmaTma, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
