// The mma_any kernel for 1 to 4 bits. Several widths share a file, since their code is alike and compresses together;
// two files, because these compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows mma_any_narrow() { return rows_of<MmaAny, Format::kAffine, 1, 2, 3, 4>(); }

}  // namespace jaxgemv::cuda
