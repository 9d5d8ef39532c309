// Chooses the variant of the wgmma_any kernel, and lays out its work.
#pragma once

#include <algorithm>
#include <limits>

#include "../common/clusters.cuh"
#include "../image/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits>
class WgmmaAnyOfWidth {
 public:
  static constexpr int kMostColumns = 128;

  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (!image::takes(problem, operands) || !has_hopper_code(device)) return false;
    if (operands.image == nullptr || !is_aligned(operands.image, 16)) return false;
    return with_variant(problem, operands, device, [&](auto variant) {
      return variant.plan(problem, operands, device).layout.across > 0;
    });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, device, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  struct Plan {
    image::Layout layout;
    Index cost = std::numeric_limits<Index>::max();
  };

  // kScaled: scales have one byte, and groups are smaller than a quad.
  template <int kColumns, bool kScaled>
  struct Variant {
    using S = wgmma_any::Shape<kFormat, kBits, kColumns>;
    static constexpr auto kKernel = wgmma_any::gemv_wgmma_any<kFormat, kBits, kColumns, kScaled>;

    // Nanoseconds on an H200, roughly (docs/cuda-notes.md): for a quad in all groups of warps, and for the end of each
    // of its slots; for a CTA, for what a cluster adds, for the kernel that makes the image, and for a record per 16
    // threads where CTAs make it.
    static constexpr int kQuadNs = (kColumns == 32 ? 1100 : 1700) + (kScaled ? 750 : 0);
    static constexpr int kSlotNs = kScaled ? 0 : kColumns == 32 ? 400 : 500;
    static constexpr int kStartNs = 5300, kClusterNs = 1000, kImageNs = 3500, kRecordNs = 2000;

    // Groups of 64 have two slots in a quad, where mma_any gives them four.
    static int slots_of(const Problem& problem, const Operands& operands) {
      const int slots = image::slots_of(problem, operands);
      return !kScaled && slots == 4 && problem.group % 64 == 0 ? 2 : slots;
    }

    // Chooses how many groups of warps have rows of their own, and how many groups and CTAs share K.
    static Plan plan(const Problem& problem, const Operands& operands, const Device& device) {
      const int parts = image::parts_of(problem, operands);
      const int pieces = image::windows_of(problem, operands, S::kUnitK).pieces;
      const int slots = slots_of(problem, operands);
      const Index rows_m = std::min<Index>(problem.M, kColumns / parts);
      const Index m_tiles = ceil_div(problem.M, rows_m) * problem.batch;
      const Index units = ceil_div(problem.K, S::kUnitK);
      const Index rows = is_gated(problem.activation) ? 32 : 64;
      const Index quad_ns = kQuadNs + (slots > 1 ? slots * kSlotNs : 0);
      const int bytes = S::shared_bytes(static_cast<int>(rows_m) * parts, pieces);
      Plan best;
      if (bytes + 1024 > device.shared_bytes) return best;
      // An SM has room for one CTA, whatever its shared memory.
      const auto clusters =
          resident_clusters<image::kMostRanks>(kKernel, {{}, S::kThreads, bytes}, device);
      for (int ranks = 1; ranks <= image::kMostRanks && ranks <= units; ++ranks)
        for (int deep = 1; deep <= S::kMostDeep && deep <= units / ranks; deep *= 2) {
          if (clusters[ranks] < 1) continue;
          const int across = S::kGroups / deep;
          const Index tiles = ceil_div(problem.y_width(), across * rows);
          const Index most = ceil_div(units, ranks), quads = most * S::kQuads;  // of a CTA
          const Index waves = ceil_div(tiles * m_tiles, clusters[ranks]);
          const Index records = ceil_div(quads * rows_m * 16, S::kConsumers) * kRecordNs;
          const bool makes = quads <= S::kXStages && waves * records < kImageNs;
          const Index cost =
              waves * (kStartNs + (ranks > 1 ? kClusterNs : 0) + (makes ? records : 0) +
                       ceil_div(most, deep) * S::kQuads * quad_ns) +
              (makes ? 0 : kImageNs);
          if (cost >= best.cost) continue;
          best = {{4 * across, deep, ranks, 0, bytes, makes, tiles}, cost};
        }
      return best;
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const image::Layout layout = plan(problem, operands, device).layout;
      image::Params p = image::params_of<S>(problem, operands, layout, kBits, kColumns,
                                            image::parts_of(problem, operands));
      p.tile_stride = p.tiles;
      p.groups.slots = slots_of(problem, operands);
      if (!layout.makes) {
        const cudaError_t status = image::launch_image<typename S::C>(
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

  // Where the weights have few rows, CTAs for fewer columns of x fill more SMs.
  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, const Device& device,
                           Use&& use) {
    if constexpr (wgmma_any::TakesScales<kFormat>::kEver)
      if (!is_wide(operands.scale.dtype) && image::slots_of(problem, operands) > 1)
        return with_columns<true>(problem, operands, device, use);
    return with_columns<false>(problem, operands, device, use);
  }
  template <bool kScaled, typename Use>
  static auto with_columns(const Problem& problem, const Operands& operands, const Device& device,
                           Use&& use) {
    using Few = Variant<32, kScaled>;
    // Kernels for more columns would spill registers if they took scales into operand A, except for tables.
    using Many = Variant<64, false>;
    using Most = Variant<128, kScaled && kFormat == Format::kCodebook>;
    const Index columns = problem.M * image::parts_of(problem, operands);
    const auto choose = [&](auto many) {
      const bool is_few =
          Few::plan(problem, operands, device).cost < many.plan(problem, operands, device).cost;
      return is_few ? use(Few{}) : use(many);
    };
    if (columns <= 32) return use(Few{});
    return columns <= 64 ? choose(Many{}) : choose(Most{});
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

}  // namespace jaxgemv::cuda
