// The direct kernel for integers of every width.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows direct_integers() { return rows_of<Direct, Format::kAffine, 1, 2, 3, 4, 5, 6, 7, 8>(); }

}  // namespace jaxgemv::cuda
