// The table of kernels: to add a width, a type or a kernel, add a row.
#include <algorithm>
#include <array>

#include "launch.h"
#include "mma.cuh"
#include "simt.cuh"

namespace jaxgemv::cuda {

namespace {

template <typename X>
using SimtRows = std::tuple<Simt<1, X>, Simt<2, X>, Simt<3, X>, Simt<4, X>, Simt<5, X>, Simt<6, X>,
                            Simt<7, X>, Simt<8, X>>;

using MmaRows = std::tuple<Mma<4, __half>, Mma<4, __nv_bfloat16>,  //
                           Mma<8, __half>, Mma<8, __nv_bfloat16>>;

// Fastest first: the first row that accepts a problem runs it.
using Table = decltype(std::tuple_cat(MmaRows{}, SimtRows<__half>{}, SimtRows<__nv_bfloat16>{},
                                      SimtRows<float>{}));

constexpr auto kTable =
    std::apply([](auto... kernels) { return std::array{decltype(kernels)::kInfo...}; }, Table{});

}  // namespace

cudaError_t launch(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  cudaError_t status = cudaErrorNotSupported;
  // A grid has at most 65535 slices; a longer batch takes several launches.
  constexpr Index kMaxBatch = 65535;
  for (Index first = 0; first < problem.batch; first += kMaxBatch) {
    Problem part = problem;
    part.batch = std::min(kMaxBatch, problem.batch - first);
    const Operands slices = operands.from_slice(problem, first);
    select<Table>(part, slices,
                  [&]<typename Kernel>(Kernel) { status = Kernel::run(part, slices, stream); });
    if (status != cudaSuccess) break;
  }
  return status;
}

std::span<const KernelInfo> kernels() { return kTable; }

}  // namespace jaxgemv::cuda
