// Chooses the variant of the mma_any kernel, and lays out its work.
#pragma once

#include <algorithm>

#include "../image/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits>
class MmaAnyOfWidth {
  using C = Decoder<kFormat, kBits>;

 public:
  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (!image::takes(problem, operands)) return false;
    const bool has_image = operands.image != nullptr && is_aligned(operands.image, 16);
    if (columns_of(problem, operands) > image::kInsideColumns && !has_image) return false;
    return with_variant(problem, operands, [&](auto variant) {
      return variant.layout(problem, operands, device).across > 0;
    });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  static Index columns_of(const Problem& problem, const Operands& operands) {
    return problem.M * image::parts_of(problem, operands);
  }

  template <int kColumnTiles>
  struct Variant {
    using S = mma_any::Shape<C, kColumnTiles>;

    // Rough nanoseconds on an H200 (docs/cuda-notes.md): for a unit in a warp, where instructions
    // bound it (kIssueNs) and where the warp waits for its own (kUnitNs); for a CTA, and more in a cluster.
    static constexpr int kIssueNs = kColumnTiles == 1 ? 110 : kColumnTiles == 8 ? 270 : 160;
    static constexpr int kUnitNs = 700, kStartNs = 4000, kClusterNs = 3000, kXBytesANs = 50;

    // Chooses how many warps have rows of their own, and how many warps and CTAs share K: what takes the least time.
    static image::Layout layout(const Problem& problem, const Operands& operands,
                                const Device& device) {
      const int parts = image::parts_of(problem, operands);
      const int pieces = image::windows_of(problem, operands, S::kUnitK).pieces;
      const Index rows_m = std::min<Index>(problem.M, image::kMostColumns / parts);
      const Index columns = rows_m * parts, units = ceil_div(problem.K, S::kUnitK);
      const Index record = S::kQuads * image::kRecordBytes * columns;
      const Index rows = S::kRows / (is_gated(problem.activation) ? 2 : 1);
      const Index groups = ceil_div(problem.M, rows_m) * problem.batch;  // that share no weights
      const bool copies = columns > image::kInsideColumns;
      // Reserved bytes of shared memory: the system's, the norm's factors, reads past the last column, a table.
      constexpr int kReserved = 1536 + 8 * kColumnTiles * image::kMetaWords * 4 + C::kTableBytes;
      image::Layout best;
      Index least = 0;
      const auto consider = [&](int ranks, int across, int deep) {
        const Index sums = image::sums_bytes<S>(across, deep);
        const Index own = across * deep * S::bytes(pieces) + (S::kMany ? 0 : sums);
        const Index room = device.shared_bytes - kReserved - own;
        const Index tiles = ceil_div(problem.y_width(), across * rows);
        const Index most = ceil_div(units, ranks);  // units of a CTA
        const Index sms = ranks > 2 ? device.sms * 15 / 16 : device.sms;
        const Index waves = ceil_div(tiles * groups * ranks, sms);
        const bool once = most * record <= room && !(copies && (S::kMany || waves == 1));
        const int buffers = once || !copies ? 1 : 2;
        Index slice = most;
        if (!once) {  // in turns
          slice = std::min(room / (record * buffers), ceil_div(most, 4) + deep - 1);
          slice -= slice % deep;
          if (slice < deep) return;
        }
        const Index steps = ceil_div(most, deep);
        const Index cost = waves * (kStartNs + (ranks > 1 ? kClusterNs : 0) +
                                    steps * std::max(kUnitNs, across * deep * kIssueNs) +
                                    most * record / kXBytesANs);
        if (best.across > 0 && cost >= least) return;
        least = cost;
        const Index bytes = own + slice * record * (slice < most ? buffers : 1) +
                            8 * kColumnTiles * image::kMetaWords * 4 + C::kTableBytes;
        best = {
            across, deep, ranks, static_cast<int>(slice), static_cast<int>(std::max(bytes, sums)),
            false,  tiles};
      };
      for (int ranks = 1; ranks <= (device.major >= 9 ? image::kMostRanks : 1); ranks *= 2)
        for (int across = 1; across <= S::kMaxWarps; ++across)
          // Also fewer than there could be, for when shared memory is small.
          for (Index deep = std::min<Index>(S::kMaxWarps / across, units / ranks); deep > 0;
               deep /= 2)
            consider(ranks, across, static_cast<int>(deep));
      return best;
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const image::Layout layout = Variant::layout(problem, operands, device);
      image::Params p = image::params_of<S>(problem, operands, layout, kBits, image::kMostColumns,
                                            image::parts_of(problem, operands));
      const bool copies = columns_of(problem, operands) > image::kInsideColumns;
      if (copies) {
        const cudaError_t status =
            image::launch_image<C>(problem, operands, p.units * S::kQuads, device, stream, &p);
        if (status != cudaSuccess) return status;
      }
      // CTAs go on to further tiles, except with many columns, where each tile needs all of x again, and in clusters.
      const bool one = S::kMany || layout.ranks > 1;
      p.tile_stride = one ? p.tiles : std::min(p.tiles, std::max(device.sms / p.m_tiles, 1));
      LaunchShape shape{{static_cast<unsigned>(p.tile_stride * p.m_tiles * p.ranks),
                         static_cast<unsigned>(problem.batch)},
                        32 * (S::kMany ? S::kMaxWarps : layout.across * layout.deep),
                        layout.bytes,
                        p.ranks};
      shape.early = copies && device.major >= 9;
      return launch_kernel(mma_any::gemv_mma_any<kFormat, kBits, kColumnTiles>, shape, device,
                           stream, p);
    }
  };

  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, Use&& use) {
    const Index columns = columns_of(problem, operands);
    if (columns <= 8) return use(Variant<1>{});
    if (columns <= 16) return use(Variant<2>{});
    if (columns <= 32) return use(Variant<4>{});
    return use(Variant<8>{});
  }
};

template <Format kFormat, int kBits, typename X>
struct MmaAny : MmaAnyOfWidth<kFormat, kBits> {
  static constexpr KernelInfo kInfo{
      "mma_any",
      kFormat,
      kBits,
      kDtypeOf<X>,
      image::kMostColumns / image::parts_of(kDtypeOf<X>, false),
      with_format(kEpilogueOperands | OperandSet::of(Operand::kNorm, Operand::kOneByteScale),
                  kFormat)};
};

}  // namespace jaxgemv::cuda
