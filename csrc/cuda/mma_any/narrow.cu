// The mma_any kernel for 1 to 4 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_int1() { return kMmaAnyRows<Format::kAffine, 1>; }
Rows mma_any_int2() { return kMmaAnyRows<Format::kAffine, 2>; }
Rows mma_any_int3() { return kMmaAnyRows<Format::kAffine, 3>; }
Rows mma_any_int4() { return kMmaAnyRows<Format::kAffine, 4>; }

}  // namespace jaxgemv::cuda
