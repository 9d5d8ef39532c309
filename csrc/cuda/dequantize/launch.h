// The transposed product with the identity as x, which is left out: y is the weights.
#pragma once

#include <cuda_runtime_api.h>

#include "../../kernel.h"
#include "../device.h"

namespace jaxgemv::cuda::dequantize {

inline constexpr const char* kName = "dequantize";
inline constexpr OperandSet kOperands =
    kTransposedOperands |
    OperandSet::of(Operand::kCodebook, Operand::kGlobalScale, Operand::kOneByteScale);

// For as many slices as a grid has room for. cudaErrorNotSupported for a format that it has no code for.
cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                cudaStream_t stream);

}  // namespace jaxgemv::cuda::dequantize
