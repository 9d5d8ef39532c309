// The wgmma_tma kernel for 3 to 5 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_int3() { return kWgmmaTmaRows<Format::kAffine, 3>; }
Rows wgmma_tma_int4() { return kWgmmaTmaRows<Format::kAffine, 4>; }
Rows wgmma_tma_int5() { return kWgmmaTmaRows<Format::kAffine, 5>; }

}  // namespace jaxgemv::cuda
