// The wgmma_tma kernel for 3 to 5 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_narrow() { return rows_of<WgmmaTma, Format::kAffine, 3, 4, 5>(); }

}  // namespace jaxgemv::cuda
