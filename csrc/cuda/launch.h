// The CUDA backend as its handler sees it: no templates, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "../gemv.h"

namespace jaxgemv::cuda {

// Runs the kernel that `choose` picks. Asynchronous on `stream`; allocates nothing on the device, synchronises nothing,
// and launches the same kernels for the same shapes and alignments, so that it can be captured into a graph.
// cudaErrorNotSupported when no kernel supports the call.
// `given`: the operands that the call has, besides kRequired.
// `only`: if not empty, no kernels but those of this name, to compare them.
cudaError_t launch(const Problem& problem, const Operands& operands, OperandSet given,
                   cudaStream_t stream, std::string_view only);

}  // namespace jaxgemv::cuda
