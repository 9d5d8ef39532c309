// The wgmma_tma kernel for 6 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_wide() { return rows_of<WgmmaTma, Format::kAffine, 6, 7, 8>(); }

}  // namespace jaxgemv::cuda
