// Chooses the variant of the kernel for many rows of x on Hopper, and how many CTAs share K.
#pragma once

#include <algorithm>
#include <array>

#include "wgmma.cuh"

namespace jaxgemv::cuda {

namespace wgmma {

// Clusters of each size that the device runs at once: SMs come in groups of different sizes, so
// there are fewer large ones than one would think. All zero if the kernel was not built for sm_90a.
template <int kBits, typename X, int kM, bool kPerRow>
const std::array<int, kMaxRanks + 1>& resident_clusters() {
  static const auto clusters = [] {
    std::array<int, kMaxRanks + 1> result{};
    const auto kernel = gemv_wgmma<kBits, X, kM, kPerRow>;
    constexpr int kBytes = Layout<kBits, kM>::kBytes;
    cudaFuncAttributes attributes{};
    const bool built = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                       attributes.numRegs > 64;  // an empty body has a few
    for (int ranks = 1; built && ranks <= kMaxRanks; ++ranks) {
      cudaLaunchAttribute cluster{};
      const auto config =
          make_config(dim3(ranks), Plan<kM>::kThreads, kBytes, nullptr, cluster, ranks);
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      cudaOccupancyMaxActiveClusters(&result[ranks], kernel, &config);
    }
    cudaGetLastError();
    return result;
  }();
  return clusters;
}

// CTAs that share K: waves of clusters, each as long as its chunks and about four more for its
// start and end. (On an H200 this picks the best or, once, the second best for M = 64 of the eight
// shapes in docs/cuda-notes.md.)
inline int choose_ranks(const std::array<int, kMaxRanks + 1>& clusters, Index tiles, Index chunks) {
  const auto cost = [&](int ranks) {
    return ceil_div(tiles, clusters[ranks]) * (4 + ceil_div(chunks, ranks));
  };
  int best = 1;
  for (int ranks = 2; ranks <= std::min<Index>(kMaxRanks, chunks); ++ranks)
    if (clusters[ranks] > 0 && cost(ranks) < cost(best)) best = ranks;
  return best;
}

}  // namespace wgmma

template <int kBits, typename X>
struct Wgmma {
  static constexpr KernelInfo kInfo{"wgmma", kBits, kDtypeOf<X>, 64, kProductOperands};
  static constexpr Index kMinM = 9;

  static bool accepts(const Problem& problem, const Operands& operands) {
    if (problem.M < kMinM || problem.M > 64 || problem.N < wgmma::kRows ||
        problem.K % wgmma::kChunkK != 0)
      return false;
    if (problem.group < problem.K && problem.group % wgmma::kChunkK != 0) return false;
    const Index strides = operands.scale.n_stride | operands.scale.g_stride |
                          operands.shift.n_stride | operands.shift.g_stride;
    return operands.scale.dtype == operands.shift.dtype && is_aligned(operands.packed, 16) &&
           operands.packed_stack_stride % 16 == 0 && is_aligned(operands.x, 16) &&
           is_aligned(operands.y, 8) && problem.N < (1 << 30) && problem.K < (1 << 22) &&
           strides < (1 << 20) && on_hopper() &&
           wgmma::resident_clusters<kBits, X, 64, false>()[1] > 0;
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    const bool per_row = problem.group >= problem.K ||
                         (operands.scale.g_stride == 0 && operands.shift.g_stride == 0);
    if (problem.M <= 32)
      return per_row ? launch<32, true>(problem, operands, stream)
                     : launch<32, false>(problem, operands, stream);
    return per_row ? launch<64, true>(problem, operands, stream)
                   : launch<64, false>(problem, operands, stream);
  }

 private:
  static bool on_hopper() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9;
  }

  template <int kM, bool kPerRow>
  static cudaError_t launch(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    constexpr int kBytes = wgmma::Layout<kBits, kM>::kBytes;
    const auto kernel = wgmma::gemv_wgmma<kBits, X, kM, kPerRow>;
    const Index tiles = ceil_div(problem.N, wgmma::kRows);
    const int ranks = wgmma::choose_ranks(wgmma::resident_clusters<kBits, X, kM, kPerRow>(),
                                          tiles * problem.batch, problem.K / wgmma::kChunkK);
    const auto in_fours = [](const Param& p) {
      return size_of(p.dtype) == 2 && p.g_stride == 1 && p.n_stride % 4 == 0 &&
             p.stack_stride % 4 == 0 && is_aligned(p.data, 8);
    };
    const bool wide =
        problem.group == wgmma::kChunkK && in_fours(operands.scale) && in_fours(operands.shift);
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute cluster{};
    const dim3 grid(static_cast<unsigned>(tiles * ranks), static_cast<unsigned>(problem.batch));
    const auto config =
        make_config(grid, wgmma::Plan<kM>::kThreads, kBytes, stream, cluster, ranks);
    return cudaLaunchKernelEx(&config, kernel, problem, operands, wide);
  }
};

}  // namespace jaxgemv::cuda
