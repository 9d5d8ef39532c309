// The wgmma_tma kernel for 6 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int6() { return kWgmmaTmaRows<Format::kAffine, 6>; }
Rows wgmma_tma_int7() { return kWgmmaTmaRows<Format::kAffine, 7>; }
Rows wgmma_tma_int8() { return kWgmmaTmaRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
