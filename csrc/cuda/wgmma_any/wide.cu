// The wgmma_any kernel for 5 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_wide() { return rows_of<WgmmaAny, Format::kAffine, 5, 6, 7, 8>(); }

}  // namespace jaxgemv::cuda
