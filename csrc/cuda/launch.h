// The CUDA backend as its handler sees it: no templates, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "../gemv.h"

namespace jaxgemv::cuda {

// Runs the first kernel of the table that accepts the problem. Asynchronous on `stream`; allocates
// nothing, synchronises nothing, and launches the same kernels for the same shapes, so that it can
// be captured into a graph. cudaErrorNotSupported when no kernel accepts.
// `given`: the operands there are, besides kRequired.
// `only`: no kernel but those of this name; to compare them.
cudaError_t launch(const Problem& problem, const Operands& operands, OperandSet given,
                   cudaStream_t stream, std::string_view only = {});

// The table, fastest kernels first.
std::span<const KernelInfo> kernels();

}  // namespace jaxgemv::cuda
