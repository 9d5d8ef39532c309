// Chooses the variant of the wgmma_any kernel, and lays out its work.
#pragma once

#include <algorithm>

#include "../mma_any/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits>
class WgmmaAnyOfWidth {
 public:
  static constexpr int kMostColumns = 128;

  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (!mma_any::takes(problem, operands) || device.major != 9) return false;
    if (operands.image == nullptr || !is_aligned(operands.image, 16)) return false;
    return with_variant(problem, operands, [&](auto variant) {
      return has_hopper_code(variant.kKernel, device) &&
             variant.layout(problem, operands, device).across > 0;
    });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  template <int kColumns>
  struct Variant {
    using S = wgmma_any::Shape<kFormat, kBits, kColumns>;
    static constexpr auto kKernel = wgmma_any::gemv_wgmma_any<kFormat, kBits, kColumns>;

    // Nanoseconds on an H200, roughly (docs/cuda-notes.md): of a quad in all groups of warps, of a
    // CTA, of one in a cluster, of the kernel that makes the image, and of a record for every 16
    // threads where CTAs do.
    static constexpr int kQuadNs = kColumns == 32 ? 350 : 600;
    static constexpr int kStartNs = 4000, kClusterNs = 1500, kImageNs = 1500, kRecordNs = 300;

    // Groups of warps with rows of their own, groups and CTAs that share K.
    static mma_any::Layout layout(const Problem& problem, const Operands& operands,
                                  const Device& device) {
      const int parts = mma_any::parts_of(problem, operands);
      const int pieces = mma_any::windows_of(problem, operands, S::kUnitK).pieces;
      const Index rows_m = std::min<Index>(problem.M, kColumns / parts);
      const Index m_tiles = ceil_div(problem.M, rows_m) * problem.batch;
      const Index units = ceil_div(problem.K, S::kUnitK);
      const Index rows = is_gated(problem.activation) ? 32 : 64;
      const int bytes = S::shared_bytes(static_cast<int>(rows_m) * parts, pieces);
      mma_any::Layout best;
      if (bytes + 1024 > device.shared_bytes) return best;
      Index least = 0;
      for (int ranks = 1; ranks <= mma_any::kMostRanks; ranks *= 2)
        for (int deep = 1; deep <= S::kMostDeep && deep <= units / ranks; deep *= 2) {
          const int across = S::kGroups / deep;
          const Index tiles = ceil_div(problem.y_width(), across * rows);
          const Index most = ceil_div(units, ranks), quads = most * S::kQuads;  // of a CTA
          const Index waves =
              ceil_div(tiles * m_tiles * ranks, ranks > 2 ? device.sms * 15 / 16 : device.sms);
          const Index records = ceil_div(quads * rows_m * 16, S::kConsumers) * kRecordNs;
          const bool makes = quads <= S::kXStages && waves * records < kImageNs;
          const Index cost =
              waves * (kStartNs + (ranks > 1 ? kClusterNs : 0) + (makes ? records : 0) +
                       ceil_div(most, deep) * S::kQuads * kQuadNs) +
              (makes ? 0 : kImageNs);
          if (best.across > 0 && cost >= least) continue;
          least = cost, best = {4 * across, deep, ranks, 0, bytes, makes, tiles};
        }
      return best;
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const mma_any::Layout layout = Variant::layout(problem, operands, device);
      mma_any::Params p = mma_any::params_of<S>(problem, operands, layout, kBits, kColumns,
                                                mma_any::parts_of(problem, operands));
      p.tile_stride = p.tiles;
      if (!layout.makes) {
        const cudaError_t status = mma_any::launch_image<typename S::C>(
            problem, operands, p.units * S::kQuads, device, stream, &p);
        if (status != cudaSuccess) return status;
      }
      LaunchShape shape{{static_cast<unsigned>(p.tiles * p.m_tiles * p.ranks),
                         static_cast<unsigned>(problem.batch)},
                        S::kThreads,
                        layout.bytes,
                        p.ranks};
      shape.early = !layout.makes;
      return launch_kernel(kKernel, shape, device, stream, p);
    }
  };

  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, Use&& use) {
    const Index columns = problem.M * mma_any::parts_of(problem, operands);
    if (columns <= 32) return use(Variant<32>{});
    if (columns <= 64) return use(Variant<64>{});
    return use(Variant<128>{});
  }
};

template <Format kFormat, int kBits, typename X>
struct WgmmaAny : WgmmaAnyOfWidth<kFormat, kBits> {
  static constexpr KernelInfo kInfo{
      "wgmma_any",
      kFormat,
      kBits,
      kDtypeOf<X>,
      64,
      with_format(kEpilogueOperands | OperandSet::of(Operand::kNorm, Operand::kOneByteScale),
                  kFormat)};
};

template <Format kFormat, int kBits>
inline constexpr Kernel kWgmmaAnyRows[] = {row<WgmmaAny<kFormat, kBits, __half>>(),
                                           row<WgmmaAny<kFormat, kBits, __nv_bfloat16>>(),
                                           row<WgmmaAny<kFormat, kBits, float>>()};

}  // namespace jaxgemv::cuda
