// Chooses the variant of the wgmma_tma kernel, and lays out its work.
#pragma once

#include <algorithm>
#include <limits>

#include "../common/clusters.cuh"
#include "../common/tensor_map.h"
#include "../image/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits>
class WgmmaTmaOfWidth {
  using InOperand = wgmma_tma::InOperand;

 public:
  // Rows of whole 16 bytes, no group boundary inside 32 codes except with scales in the operand; a Hopper, with code
  // for it.
  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (!image::has_tma_rows(problem)) return false;
    if (!has_hopper_code(device) || !image::takes(problem, operands) ||
        (image::slots_of(problem, operands) > 4 &&
         in_operand(problem, operands) == InOperand::kNone))
      return false;
    if (operands.image == nullptr || !is_aligned(operands.image, 16) ||
        operands.image_row_bytes <
            image::image_row_bytes(problem, image::parts_of(problem, operands)))
      return false;
    if (!has_map_of_bytes(problem, operands)) return false;
    const Param& norm = operands.norm;
    if (!is_aligned(operands.x, 16) || !is_aligned(norm.data, 16) ||
        norm.stack_stride * size_of(norm.dtype) % 16 != 0)
      return false;
    return with_variant(problem, operands, [&](auto variant) {
      return variant.plan(problem, operands, device).across > 0;
    });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  // For up to kColumns columns of x; kEnds: ends of groups in a quad, or 0: one scale per row of the weights, and one
  // column per row of x. (Tensor cores truncate what they add to the unit of the largest, which over all of K is too
  // much for float32.)
  template <int kColumns, int kEnds, InOperand kIn>
  struct Variant {
    using S = wgmma_tma::Shape<kFormat, kBits, kColumns, kEnds, kIn>;
    static constexpr auto kKernel = wgmma_tma::gemv_wgmma_tma<kFormat, kBits, kColumns, kEnds, kIn>;

    // Nanoseconds on an H200, roughly (docs/cuda-notes.md): for a quad in all groups of warps, with one end and with
    // more (with three of four groups 0.8 of that); for x of a quad and column; for a CTA; for what a cluster adds; for
    // a column of each further CTA in it.
    static constexpr int kEndNs = kColumns == 16 ? 60 : kColumns == 32 ? 100 : 200;
    static constexpr int kQuadNs = (kColumns == 16   ? 500
                                    : kColumns == 32 ? 600
                                                     : 900) +
                                   (S::kQuadPieces - 1) * kEndNs;
    static constexpr int kColumnNs = 5, kStartNs = 5000, kClusterNs = 1000, kRankNs = 5;

    // How often tensor cores may add the shifts of two pieces to a sum: they truncate it, and if all are of one sign,
    // by 0.36 * 2^-24 of it each time, and float32 x is promised 2^-20.
    static constexpr Index kMostAdds = 44;

    // Chooses how many groups of warps have rows of their own, and how many groups and CTAs share K.
    static image::Layout plan(const Problem& problem, const Operands& operands,
                              const Device& device) {
      const int parts = image::parts_of(problem, operands);
      const Index rows_m = std::min<Index>(problem.M, kColumns / parts);
      const Index m_tiles = ceil_div(problem.M, rows_m) * problem.batch;
      const Index units = ceil_div(problem.K, S::kUnitK);
      const Index rows = is_gated(problem.activation) ? 32 : 64;
      const Index columns = rows_m * parts;
      int bytes = 0;
      for (int deep = 1; deep <= S::kMostDeep; deep *= 2)
        bytes = std::max(bytes, S::shared_bytes(16 / deep, deep));
      image::Layout best;
      if (bytes + 2048 > device.shared_bytes) return best;
      const auto clusters =
          resident_clusters<image::kMostRanks>(kKernel, {{}, S::kThreads, bytes}, device);
      Index least = std::numeric_limits<Index>::max();
      const auto weigh = [&](int ranks, int deep, int groups) {
        const int across = groups / deep;
        const Index tiles = ceil_div(problem.y_width(), across * rows);
        const Index waves = ceil_div(tiles * m_tiles, clusters[ranks]);
        const Index most = ceil_div(units, ranks);  // of a CTA
        const Index adds = ceil_div(most, deep) * S::kPieces / 2;
        if (S::kSplitsSums && parts == 2 && adds > kMostAdds) return;
        const Index quad_ns =
            std::max<Index>(kQuadNs * (groups + 1) / (S::kGroups + 1), deep * columns * kColumnNs);
        const Index cluster_ns = ranks > 1 ? kClusterNs + (ranks - 2) * columns * kRankNs : 0;
        const Index cost =
            waves * (kStartNs + cluster_ns + ceil_div(most, deep) * S::kQuads * quad_ns);
        if (cost >= least) return;
        least = cost;
        best = {4 * across, deep, ranks, 0, bytes, false, tiles};
      };
      for (int ranks = 1; ranks <= image::kMostRanks && ranks <= units; ++ranks) {
        if (clusters[ranks] < 1) continue;
        // Of four groups each has stages of x for one box, which takes E2M1 5% to 15% longer where loops are long.
        const int most_deep = S::kScalesNumbers && ranks == 1 ? 2 : S::kMostDeep;
        for (int deep = 1; deep <= most_deep && deep <= units / ranks; deep *= 2)
          weigh(ranks, deep, S::kGroups);
        weigh(ranks, 1, S::kGroups - 1);  // SMs that would idle have work, and the others less
      }
      return best;
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const image::Layout layout = plan(problem, operands, device);
      image::Params p = image::params_of<S>(problem, operands, layout, kBits, kColumns,
                                            image::parts_of(problem, operands));
      const int box_rows = is_gated(problem.activation) ? S::kBoxRows / 2 : S::kBoxRows;
      CUtensorMap map;
      cudaError_t status =
          map_of_bytes(problem, operands, p.row_bytes, S::kRowBytes, box_rows, &map);
      if (status != cudaSuccess) return status;
      p.image = static_cast<const uint8_t*>(operands.image);
      // Not for small groups, which need the L1 for their scales, of 256 rows or two for each: 28672 x 4096, 16 rows,
      // int4 g32 took 59 us instead of 50, g64 40 instead of 36, and 4096 x 14336 g32 31 instead of 29 on an H200.
      const bool keeps_shared = S::kEnds < 2 || (layout.deep > 1 && S::kEnds * S::kNumbers < 16);
      status = wgmma_tma::launch_image(
          problem, p, static_cast<uint8_t*>(operands.image),
          {p.units * S::kQuads, kColumns, S::kRecordBytes, S::kLogLanes, S::kSums > 0,
           S::kSplitsSums, S::kRuns, S::C::kHasShift && kEnds == 0,
           !S::kHasTable && kIn != InOperand::kE8M0},
          S::kHasPairs, keeps_shared, device, stream);
      if (status != cudaSuccess) return status;
      // Whether the scales of four groups follow one another, in whole pieces of what a lane copies.
      const auto has_fours = [](const ScaleSource& source) {
        const int size = size_of(source.dtype), bytes = std::max(size * S::kNumbers, 4);
        return source.g_bytes == size && source.n_bytes % (4 * size) == 0 &&
               source.stack_bytes % bytes == 0 && is_aligned(source.data, bytes);
      };
      const bool by_fours =
          S::kMostTurn > 1 && p.longer == 0 && p.share_units % (S::kMostTurn * p.deep) == 0;
      const bool ahead = problem.group * S::kQuadPieces == image::kQuadK &&
                         has_fours(p.scales[0]) && has_fours(p.scales[1]);
      LaunchShape shape{{static_cast<unsigned>(p.tiles * p.m_tiles * p.ranks),
                         static_cast<unsigned>(problem.batch)},
                        S::kThreads,
                        layout.bytes,
                        p.ranks};
      shape.early = true;
      return launch_kernel(kKernel, shape, device, stream, p, map, box_rows, by_fours, ahead,
                           packs(p), wgmma_tma::rows_each(p.rows_m, p.ranks));
    }
  };

  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, Use&& use) {
    const int parts = image::parts_of(problem, operands);
    const Index columns = problem.M * parts;
    if constexpr (kFormat == Format::kCodebook) {
      const InOperand in = in_operand(problem, operands);
      if (in == InOperand::kE4M3) return with_columns<1, InOperand::kE4M3>(columns, use);
      if (in == InOperand::kE8M0) return with_columns<1, InOperand::kE8M0>(columns, use);
    }
    if (image::slots_of(problem, operands) > 1)
      return problem.group % 64 == 0 ? with_columns<2>(columns, use)
                                     : with_columns<4>(columns, use);
    // Not for tables: ptxas would serialize their wgmma.
    if constexpr (kFormat != Format::kCodebook)
      if (parts == 1 && image::groups_of(problem, operands).last == 0)
        return with_columns<0>(problem.M, use);
    return with_columns<1>(columns, use);
  }
  template <int kEnds, InOperand kIn = InOperand::kNone, typename Use>
  static auto with_columns(Index columns, Use&& use) {
    return columns <= 16   ? use(Variant<16, kEnds, kIn>{})
           : columns <= 32 ? use(Variant<32, kEnds, kIn>{})
                           : use(Variant<64, kEnds, kIn>{});
  }

  // Which scales go into operand A: those of tables, of one byte, whose groups follow one another in memory.
  static InOperand in_operand(const Problem& problem, const Operands& operands) {
    const Param& scale = operands.scale;
    if (kFormat != Format::kCodebook || has_one_group(problem, operands) || scale.g_stride != 1)
      return InOperand::kNone;
    // Some are loaded four at a time, or two; rows are whole ones.
    if (!is_aligned(scale.data, 4)) return InOperand::kNone;
    if (scale.dtype == Dtype::kE8M0 && problem.group == 32) return InOperand::kE8M0;
    return scale.dtype == Dtype::kE4M3 && problem.group == 16 ? InOperand::kE4M3 : InOperand::kNone;
  }
};

template <Format kFormat, int kBits, typename X>
struct WgmmaTma : WgmmaTmaOfWidth<kFormat, kBits> {
  static constexpr KernelInfo kInfo{
      "wgmma_tma",
      kFormat,
      kBits,
      kDtypeOf<X>,
      64,
      with_format(kEpilogueOperands | OperandSet::of(Operand::kNorm, Operand::kOneByteScale),
                  kFormat)};
};

}  // namespace jaxgemv::cuda
