// The gemm kernel for 1 to 4 bits. Widths of one file are much alike, and compressed together; two
// files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows gemm_narrow() { return rows_of<Gemm, Format::kAffine, 1, 2, 3, 4>(); }

}  // namespace jaxgemv::cuda
