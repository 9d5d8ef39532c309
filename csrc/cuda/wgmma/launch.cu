// Chooses the variant of the kernel for many rows of x on Hopper, and how many CTAs share K.
#include <algorithm>

#include "../common/clusters.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

namespace wgmma {
namespace {

// How many CTAs share K, by the least cost: waves of clusters, each as long as its chunks and about four more for its
// start and end. (On an H200 this picks the best or, once, the second best for M = 64 of the eight shapes in
// docs/cuda-notes.md.) Zero if no cluster of any size can run.
int choose_ranks(const Clusters<kMaxRanks>& clusters, Index tiles, Index chunks) {
  int best = 0;
  Index least = 0;
  for (int ranks = 1; ranks <= std::min<Index>(kMaxRanks, chunks); ++ranks) {
    if (clusters[ranks] < 1) continue;
    const Index cost = ceil_div(tiles, clusters[ranks]) * (4 + ceil_div(chunks, ranks));
    if (best == 0 || cost < least) best = ranks, least = cost;
  }
  return best;
}

}  // namespace
}  // namespace wgmma

template <int kBits, typename X>
struct Wgmma {
  static constexpr int kMaxM = 64;
  static constexpr KernelInfo kInfo{"wgmma",     Format::kAffine, kBits,
                                    kDtypeOf<X>, kMaxM,           kProductOperands};

  // Whole tiles of N and chunks of K, no group boundary inside a chunk, 16-byte loads; a Hopper,
  // with code for it.
  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (problem.M > kMaxM || problem.N < wgmma::kRows || problem.K % wgmma::kChunkK != 0)
      return false;
    if (problem.group < problem.K && problem.group % wgmma::kChunkK != 0) return false;
    // The last tile may compute rows of the one before again, which must not have their bias overwritten.
    if (operands.bias.data != nullptr && operands.bias.data == operands.y) return false;
    const Index strides = operands.scale.n_stride | operands.scale.g_stride |
                          operands.shift.n_stride | operands.shift.g_stride;
    return operands.scale.dtype == operands.shift.dtype && is_aligned(operands.packed, 16) &&
           operands.packed_stack_stride % 16 == 0 && is_aligned(operands.x, 16) &&
           is_aligned(operands.y, 8) && problem.N < (1 << 30) && problem.K < (1 << 22) &&
           strides < (1 << 20) && has_hopper_code(device) &&
           with_variant(
               problem, operands,
               [&]<int kM, bool kPerRow>(Variant<kM, kPerRow> variant) {
                 return variant.ranks(problem, device) > 0;
               });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  // For up to kM rows of x; kPerRow: one scale for each row of the weights.
  template <int kM, bool kPerRow>
  struct Variant {
    static constexpr auto kKernel = wgmma::gemv_wgmma<kBits, X, kM, kPerRow>;
    static constexpr LaunchShape kShape = {
        {}, wgmma::Roles<kM>::kThreads, wgmma::SharedMemory<kBits, kM>::kBytes};

    static Index tiles(const Problem& problem) { return ceil_div(problem.N, wgmma::kRows); }

    static int ranks(const Problem& problem, const Device& device) {
      const auto clusters = resident_clusters<wgmma::kMaxRanks>(kKernel, kShape, device);
      return wgmma::choose_ranks(clusters, tiles(problem) * problem.batch,
                                 problem.K / wgmma::kChunkK);
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const auto in_fours = [](const Param& p) {
        return size_of(p.dtype) == 2 && p.g_stride == 1 && p.n_stride % 4 == 0 &&
               p.stack_stride % 4 == 0 && is_aligned(p.data, 8);
      };
      const bool wide =
          problem.group == wgmma::kChunkK && in_fours(operands.scale) && in_fours(operands.shift);
      LaunchShape shape = kShape;
      shape.ranks = ranks(problem, device);
      if (!make_grid(tiles(problem) * shape.ranks, problem.batch, &shape.grid))
        return cudaErrorInvalidConfiguration;
      return launch_kernel(kKernel, shape, device, stream, problem, operands, wide);
    }
  };

  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, Use&& use) {
    const bool per_row = has_one_group(problem, operands);
    if (problem.M <= 32) return per_row ? use(Variant<32, true>{}) : use(Variant<32, false>{});
    return per_row ? use(Variant<64, true>{}) : use(Variant<64, false>{});
  }
};

Rows wgmma_rows() {
  static constexpr Kernel kRows[] = {row<Wgmma<4, __half>>(), row<Wgmma<4, __nv_bfloat16>>(),
                                     row<Wgmma<8, __half>>(), row<Wgmma<8, __nv_bfloat16>>()};
  return kRows;
}

}  // namespace jaxgemv::cuda
