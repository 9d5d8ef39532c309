#include "launch.h"

#include <algorithm>

#include "choose.h"
#include "dequantize/launch.h"
#include "record.h"
#include "table.h"

namespace jaxgemv::cuda {

cudaError_t launch(const Problem& problem, const Operands& operands, OperandSet given,
                   cudaStream_t stream, std::string_view only) {
  Device device;
  cudaError_t status = current_device(&device);
  // A grid has at most 65535 slices; a longer batch takes several launches.
  constexpr Index kMaxBatch = 65535;
  if (recorder() != nullptr && problem.batch > kMaxBatch) return recorder()->capture();
  for (Index first = 0; first < problem.batch && status == cudaSuccess; first += kMaxBatch) {
    Problem part = problem;
    part.batch = std::min(kMaxBatch, problem.batch - first);
    Operands slices = operands.from_slice(problem, first);
    // Kernels load shift before they look at affine.
    if (problem.affine == Affine::kSymmetric) slices.shift = slices.scale;
    if (slices.x == nullptr) {
      status = dequantize::run(part, slices, device, stream);
      trace().last = dequantize::kName;
      continue;
    }
    const Kernel* kernel =
        choose(table(), std::span(kCrossovers), part, given, only,
               [&](const Kernel& row) { return row.supports(part, slices, device); });
    if (kernel == nullptr) return cudaErrorNotSupported;
    status = kernel->run(part, slices, device, stream);
    trace().last = kernel->info.name;
  }
  return status;
}

}  // namespace jaxgemv::cuda
