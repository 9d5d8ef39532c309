// The gemm kernel for tables of 16.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_table4() { return rows_of<Gemm, Format::kCodebook, 4>(); }

}  // namespace jaxgemv::cuda
