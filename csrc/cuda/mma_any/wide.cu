// The mma_any kernel for 5 to 8 bits. Widths of one file are much alike, and compressed together;
// two files compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_int5() { return kMmaAnyRows<Format::kAffine, 5>; }
Rows mma_any_int6() { return kMmaAnyRows<Format::kAffine, 6>; }
Rows mma_any_int7() { return kMmaAnyRows<Format::kAffine, 7>; }
Rows mma_any_int8() { return kMmaAnyRows<Format::kAffine, 8>; }

}  // namespace jaxgemv::cuda
