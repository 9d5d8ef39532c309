// The table of kernels. A new kernel is a row here; a new width or type is one more argument of the
// rows below, for each kernel that has code for it.
#include <algorithm>
#include <array>

#include "launch.h"
#include "mma.cuh"
#include "simt.cuh"
#include "stream_launch.cuh"
#include "transposed_launch.cuh"
#include "transposed_simt.cuh"
#include "wgmma_launch.cuh"

namespace jaxgemv::cuda {

namespace {

template <typename X>
using SimtRows = std::tuple<Simt<1, X>, Simt<2, X>, Simt<3, X>, Simt<4, X>, Simt<5, X>, Simt<6, X>,
                            Simt<7, X>, Simt<8, X>>;

// Of each width, the kernels for few rows of x, for many, and for what these refuse.
template <typename X>
using FastRows = std::tuple<Stream<2, X>, Stream<4, X>, Stream<8, X>,  //
                            Wgmma<4, X>, Wgmma<8, X>,                  //
                            Mma<4, X>, Mma<8, X>>;

// Fastest first: the first row that accepts a problem runs it.
using Table =
    decltype(std::tuple_cat(FastRows<__half>{}, FastRows<__nv_bfloat16>{}, SimtRows<__half>{},
                            SimtRows<__nv_bfloat16>{}, SimtRows<float>{}));

template <typename X>
using TransposedRows = std::tuple<Transposed<2, X>, Transposed<4, X>, Transposed<8, X>,  //
                                  TransposedSimt<1, X>, TransposedSimt<2, X>, TransposedSimt<3, X>,
                                  TransposedSimt<4, X>, TransposedSimt<5, X>, TransposedSimt<6, X>,
                                  TransposedSimt<7, X>, TransposedSimt<8, X>>;

using TransposedTable = decltype(std::tuple_cat(
    TransposedRows<__half>{}, TransposedRows<__nv_bfloat16>{}, TransposedRows<float>{}));

constexpr auto kTable =
    std::apply([](auto... kernels) { return std::array{decltype(kernels)::kInfo...}; },
               decltype(std::tuple_cat(Table{}, TransposedTable{})){});

}  // namespace

cudaError_t launch(const Problem& problem, const Operands& operands, OperandSet given,
                   cudaStream_t stream, std::string_view only) {
  cudaError_t status = cudaErrorNotSupported;
  // A grid has at most 65535 slices; a longer batch takes several launches.
  constexpr Index kMaxBatch = 65535;
  for (Index first = 0; first < problem.batch; first += kMaxBatch) {
    Problem part = problem;
    part.batch = std::min(kMaxBatch, problem.batch - first);
    Operands slices = operands.from_slice(problem, first);
    // Kernels may read shift before they look at affine.
    if (problem.affine == Affine::kSymmetric) slices.shift = slices.scale;
    const auto run = [&]<typename Kernel>(Kernel) {
      if (!only.empty() && Kernel::kInfo.name != only) return false;
      status = Kernel::run(part, slices, stream);
      return true;
    };
    problem.transposed ? select<TransposedTable>(part, slices, given, run)
                       : select<Table>(part, slices, given, run);
    if (status != cudaSuccess) break;
  }
  return status;
}

std::span<const KernelInfo> kernels() { return kTable; }

}  // namespace jaxgemv::cuda
