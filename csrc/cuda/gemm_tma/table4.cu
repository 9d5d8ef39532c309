// The gemm_tma kernel for tables of 16.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_tma_table4() { return rows_of<GemmTma, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
