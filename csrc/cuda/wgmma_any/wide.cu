// The wgmma_any kernel for 5 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int5() { return kWgmmaAnyRows<Format::kAffine, 5>; }
Rows wgmma_any_int6() { return kWgmmaAnyRows<Format::kAffine, 6>; }
Rows wgmma_any_int7() { return kWgmmaAnyRows<Format::kAffine, 7>; }
Rows wgmma_any_int8() { return kWgmmaAnyRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
