// The mma_any kernel for 5 to 8 bits. Several widths share a file, since their code is alike and compresses together;
// two files, because these compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_wide() { return rows_of<MmaAny, Format::kAffine, 5, 6, 7, 8>(); }

}  // namespace jaxgemv::cuda
