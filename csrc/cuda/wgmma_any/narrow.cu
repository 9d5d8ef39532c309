// The wgmma_any kernel for 1 to 4 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_any_int1() { return kWgmmaAnyRows<Format::kAffine, 1>; }
Rows wgmma_any_int2() { return kWgmmaAnyRows<Format::kAffine, 2>; }
Rows wgmma_any_int3() { return kWgmmaAnyRows<Format::kAffine, 3>; }
Rows wgmma_any_int4() { return kWgmmaAnyRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
