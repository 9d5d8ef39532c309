// Lays out the work of the gemm kernel.
#pragma once

#include <algorithm>
#include <limits>

#include "../common/clusters.cuh"
#include "../image/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
class Gemm {
  using S = gemm::Shape<kFormat, kBits, X>;
  static constexpr auto kKernel = gemm::gemv_gemm<kFormat, kBits, X>;

 public:
  static constexpr KernelInfo kInfo{"gemm",      kFormat,     kBits,
                                    kDtypeOf<X>, S::kColumns, image::rounded_operands(kFormat)};

  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    return problem.rounded && has_hopper_code(device) && image::takes(problem, operands) &&
           operands.image != nullptr && is_aligned(operands.image, 16) &&
           layout(problem, operands, device).across > 0;
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const image::Layout layout = Gemm::layout(problem, operands, device);
    image::Params p =
        image::params_of<S>(problem, operands, layout, kBits, S::kColumns, /*parts=*/1);
    p.tile_stride = p.tiles;
    image::make_even(&p);
    const int blocks = p.units * S::kQuads * gemm::kBlocks;
    auto* const image = static_cast<uint8_t*>(operands.image);
    p.image = image;
    LaunchShape shape{{static_cast<unsigned>(ceil_div(problem.M, Index{gemm::kRowsOfImage})),
                       static_cast<unsigned>(ceil_div(Index{blocks}, Index{gemm::kBlocksOfImage})),
                       static_cast<unsigned>(problem.batch)},
                      4 * gemm::kRowsOfImage * gemm::kBlocksOfImage};
    shape.leads = true;
    const cudaError_t status =
        launch_kernel(gemm::make_image<kFormat, kBits, X>, shape, device, stream, p, image, blocks);
    if (status != cudaSuccess) return status;
    shape = {{static_cast<unsigned>(p.tiles * p.m_tiles * p.ranks),
              static_cast<unsigned>(problem.batch)},
             S::threads(p.across / 4),
             layout.bytes,
             p.ranks};
    shape.early = true;
    return launch_kernel(kKernel, shape, device, stream, p, image::packs(p));
  }

 private:
  // The image takes no more of the call's scratch than mma_any's, which that is sized for.
  static_assert(image::kQuadK * sizeof(X) <= image::kRecordBytes * (S::kWide ? 2 : 1));

  // Nanoseconds on an H200, roughly (docs/cuda-notes.md): for a block, at least and for each group of warps; for a CTA;
  // and for each group of a CTA in a cluster.
  static constexpr int kBlockNs = 220, kGroupNs = S::kWide ? 190 : 115;
  static constexpr int kStartNs = 5000, kClusterNs = 500;

  static image::Layout layout(const Problem& problem, const Operands& operands,
                              const Device& device) {
    const int pieces = image::windows_of(problem, operands, S::kUnitK).pieces;
    const Index m_tiles = ceil_div(problem.M, Index{S::kColumns}) * problem.batch;
    const Index units = ceil_div(problem.K, S::kUnitK);
    image::Layout best;
    const auto clusters = resident_clusters<image::kMostRanks>(  // of one CTA on an SM
        kKernel, {{}, S::threads(S::kMostGroups), device.shared_bytes - 4096}, device);
    Index least = std::numeric_limits<Index>::max();
    for (int groups = S::kMostGroups; groups > 0; --groups) {
      const int bytes =
          std::max(S::shared_bytes(groups, pieces), image::sums_bytes<S>(4 * groups, /*deep=*/1));
      if (bytes + 1024 > device.shared_bytes) continue;
      const Index tiles = ceil_div(problem.N, Index{64} * groups);
      for (int ranks = 1; ranks <= image::kMostRanks && ranks <= units; ++ranks) {
        if (clusters[ranks] < 1) continue;
        const Index waves = ceil_div(tiles * m_tiles, clusters[ranks]);
        const Index blocks = ceil_div(units, ranks) * S::kQuads * gemm::kBlocks;
        const Index cost = waves * (kStartNs + (ranks > 1 ? groups * kClusterNs : 0) +
                                    blocks * std::max(kBlockNs, groups * kGroupNs));
        if (cost >= least) continue;
        least = cost, best = {4 * groups, 1, ranks, 0, bytes, false, tiles};
      }
    }
    return best;
  }
};

}  // namespace jaxgemv::cuda
