// The wgmma_tma kernel for tables of 16.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows wgmma_tma_table4() { return kWgmmaTmaRows<Format::kCodebook, 4>; }

}  // namespace jaxgemv::cuda
