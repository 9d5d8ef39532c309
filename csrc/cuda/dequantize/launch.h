// The transposed product with the identity as x, which the call leaves out: y is the dequantised weights.
#pragma once

#include <cuda_runtime_api.h>

#include "../../kernel.h"
#include "../device.h"

namespace jaxgemv::cuda::dequantize {

inline constexpr const char* kName = "dequantize";
inline constexpr OperandSet kOperands =
    kTransposedOperands |
    OperandSet::of(Operand::kCodebook, Operand::kGlobalScale, Operand::kOneByteScale);

// Takes as many slices as a grid has room for. Returns cudaErrorNotSupported for calls that it has no code for.
cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                cudaStream_t stream);

}  // namespace jaxgemv::cuda::dequantize
