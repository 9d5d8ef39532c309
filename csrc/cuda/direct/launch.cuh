// Chooses the variant of the direct kernel, and lays out its work.
#pragma once

#include <algorithm>
#include <numeric>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {
namespace direct {

// The most tiles of eight rows of x that a warp has: registers allow no more.
template <typename X>
inline constexpr int kMostTilesM = std::is_same_v<X, float> ? 1 : 2;

// Blocks of a unit: as many as registers allow; or one (has_one_block), where that may be faster.
constexpr int most_blocks(Sharing sharing, bool has_norm, bool is_table, int tiles_m) {
  if (sharing == Sharing::kWhole) return kMostBlocks;
  const bool has_more = has_norm || (is_table && tiles_m > 1);
  return kMostBlocks / (sharing == Sharing::kHalves ? 2 : 1) / (has_more ? 2 : 1);
}

constexpr bool has_one_block(bool has_norm, int tiles_m) { return !has_norm && tiles_m == 1; }

// blocks: of a unit; group_blocks: of a group within a unit; whole: whether a lane has whole blocks (Sharing::kWhole).
struct Layout {
  int tiles_m = 0, blocks = 0, group_blocks = 0;
  bool whole = false;
  int log_across = 0, log_deep = 0, log_ranks = 0, units = 0;
  Index tiles = 0;
  int parts = 1;  // what x costs, in parts of 16-bit x

  int ranks() const { return 1 << log_ranks; }
};

inline Norm norm_of(const Problem& problem, const Operands& operands) {
  if (operands.norm.data == nullptr) return Norm::kNone;
  const bool is_short = problem.x == Dtype::kBF16 && operands.norm.dtype == Dtype::kBF16;
  return is_short ? Norm::kShort : Norm::kAny;
}

// A layout's time in nanoseconds, roughly: the time to issue all instructions of an SM, or that of a warp with its
// waits for memory, as often as CTAs follow one another. Fitted on an H100 to the times of all layouts of
// thirty products: what it chooses takes 1% longer than the best ("Groups of less than 128 in
// `direct`" in docs/cuda-notes.md).
inline Index cost_of(const Layout& layout, const Problem& problem, const Device& device) {
  constexpr int kMemoryNs = 430, kClusterNs = 1000, kRankNs = 100, kWarps = 16;  // of an SM
  const int warps = 1 << (layout.log_across + layout.log_deep);
  const Index steps = ceil_div(layout.units, 1 << layout.log_deep);
  // The lookups of an octet's codes in a table, for both rows.
  const int look_up = problem.format == Format::kCodebook ? 60 : 0;
  const Index instructions =
      250 + steps * (150 + 30 * (layout.blocks / layout.group_blocks) +
                     layout.blocks * (45 + look_up + 17 * layout.tiles_m * layout.parts));
  const Index ctas =
      layout.tiles * layout.ranks() * ceil_div(problem.M, layout.tiles_m * kTileM) * problem.batch;
  const Index on_sm = ceil_div(ctas, device.sms) * warps;
  const Index issue = on_sm * instructions / 4;
  const Index alone = ceil_div(on_sm, kWarps) * (instructions * 19 / 10 + steps * kMemoryNs);
  return std::max(issue, alone) + instructions * 2 / 7 +
         (layout.log_ranks > 0 ? kClusterNs + kRankNs * layout.ranks() : 0);
}

// Tables may have groups of half a block.
constexpr int kHalfBlock = kBlockK / 2;

inline bool has_halves(const Problem& problem, const Operands& operands) {
  return problem.format == Format::kCodebook && problem.group == kHalfBlock &&
         !has_one_group(problem, operands);
}

// The layout that costs least.
inline Layout layout_of(const Problem& problem, const Operands& operands, const Device& device) {
  const bool one = has_one_group(problem, operands);
  const Norm norm = norm_of(problem, operands);
  const bool is_wide = problem.x == Dtype::kF32;
  const int most_tiles_m =
      is_wide || norm != Norm::kNone ? kMostTilesM<float> : kMostTilesM<__half>;
  const int parts = norm == Norm::kAny ? 8 : is_wide ? 3 : norm == Norm::kShort ? 2 : 1;
  const bool has_norm = norm != Norm::kNone, is_table = problem.format == Format::kCodebook;
  const Sharing sharing = has_halves(problem, operands) ? Sharing::kHalves : Sharing::kBeside;
  const bool whole = !is_table && problem.K % kBlockK == 0 && is_aligned(operands.packed, 16) &&
                     (one || problem.group % (kMostBlocks * kBlockK) == 0);
  const Index of_group = one ? kMostBlocks : std::max(problem.group / kBlockK, Index{1});
  Layout best;
  Index least = 0;
  for (int tiles_m = 1; tiles_m <= most_tiles_m; ++tiles_m)
    for (const int blocks : {1, 2, kMostBlocks}) {
      const bool is_whole = whole && blocks == kMostBlocks;
      const bool is_most = blocks == most_blocks(sharing, has_norm, is_table, tiles_m);
      const bool is_one = blocks == 1 && has_one_block(has_norm, tiles_m);
      if (!is_whole && !is_most && !is_one) continue;
      const Index all = ceil_div(problem.K, kBlockK * blocks);  // units
      for (int log_ranks = 0; 1 << log_ranks <= (device.major >= 9 ? kMostRanks : 1); ++log_ranks) {
        const Index units = ceil_div(all, 1 << log_ranks);
        for (int log_across = 0; 1 << log_across <= kMaxWarps; ++log_across)
          for (int log_deep = 0; 1 << (log_across + log_deep) <= kMaxWarps; ++log_deep) {
            if (1 << log_deep > units) break;
            const Layout layout = {tiles_m,
                                   blocks,
                                   static_cast<int>(std::gcd(of_group, blocks)),
                                   is_whole,
                                   log_across,
                                   log_deep,
                                   log_ranks,
                                   static_cast<int>(units),
                                   ceil_div(problem.N, kTileN << log_across),
                                   parts};
            const Index cost = cost_of(layout, problem, device);
            if (best.tiles > 0 && cost >= least) continue;
            best = layout, least = cost;
          }
      }
    }
  return best;
}

inline Params params_of(const Problem& problem, const Operands& operands, const Layout& layout) {
  Params p{};
  p.weights = weight_source_of(problem, operands);
  p.codebook = operands.codebook;
  p.x = operands.x, p.index = operands.index, p.stack = static_cast<int>(problem.stack);
  p.M = static_cast<int>(problem.M), p.N = static_cast<int>(problem.N);
  p.K = static_cast<int>(problem.K);
  p.log_across = layout.log_across, p.log_deep = layout.log_deep, p.log_ranks = layout.log_ranks;
  p.units = layout.units;
  p.group_blocks = layout.group_blocks;
  const bool gated = is_gated(problem.activation);
  p.log_step = gated ? 3 : 4, p.apart = gated ? p.N / 2 : kTileN / 2;
  p.output = output_of(problem, operands), p.norm = operands.norm, p.eps = problem.eps;
  return p;
}

}  // namespace direct

template <Format kFormat, int kBits, typename X>
struct Direct {
  static constexpr bool kIsTable = kFormat == Format::kCodebook;
  static constexpr int kTilesM = direct::kMostTilesM<X>;
  static constexpr KernelInfo kInfo{
      "direct",
      kFormat,
      kBits,
      kDtypeOf<X>,
      kTilesM * direct::kTileM,
      with_format(
          kEpilogueOperands | OperandSet::of(Operand::kNorm) |
              (kFormat == Format::kAffine ? OperandSet{} : OperandSet::of(Operand::kOneByteScale)),
          kFormat)};

  // Needs whole octets of x, no group boundary inside a block except in its middle, and 32-bit m, n and k.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    const bool halves = direct::has_halves(problem, operands);
    return problem.K % kOctet == 0 && is_aligned(operands.x, 16) &&
           is_aligned(operands.norm.data, 16) &&
           has_weight_source(problem, operands, halves ? direct::kHalfBlock : direct::kBlockK);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const direct::Layout layout = direct::layout_of(problem, operands, device);
    const direct::Params params = direct::params_of(problem, operands, layout);
    const Index tiles_m = ceil_div(problem.M, layout.tiles_m * direct::kTileM);
    const LaunchShape shape{{static_cast<unsigned>(layout.tiles * layout.ranks()),
                             static_cast<unsigned>(problem.batch), static_cast<unsigned>(tiles_m)},
                            32 << (layout.log_across + layout.log_deep),
                            /*shared_bytes=*/0,
                            layout.ranks()};
    const auto launch = [&](auto kernel) {
      return launch_kernel(kernel, shape, device, stream, params);
    };
    const Norm norm = direct::norm_of(problem, operands);
    if constexpr (kIsTable) {
      if (direct::has_halves(problem, operands))
        return with_sharing<Sharing::kHalves>(layout, norm, launch);
    } else {
      if (layout.whole) return with_sharing<Sharing::kWhole>(layout, norm, launch);
    }
    return with_sharing<Sharing::kBeside>(layout, norm, launch);
  }

 private:
  using Norm = direct::Norm;
  using Sharing = direct::Sharing;

  template <Sharing kSharing>
  static cudaError_t with_sharing(const direct::Layout& layout, Norm norm, const auto& launch) {
    if (norm == Norm::kAny) return with_rows<kSharing, 1, Norm::kAny>(layout, launch);
    if constexpr (std::is_same_v<X, __nv_bfloat16>)
      if (norm == Norm::kShort) return with_rows<kSharing, 1, Norm::kShort>(layout, launch);
    if (layout.tiles_m == 1) return with_rows<kSharing, 1, Norm::kNone>(layout, launch);
    return with_rows<kSharing, kTilesM, Norm::kNone>(layout, launch);
  }

  template <Sharing kSharing, int kM, Norm kNorm>
  static cudaError_t with_rows(const direct::Layout& layout, const auto& launch) {
    using direct::gemv_direct, direct::Lanes;
    constexpr int kMost = direct::most_blocks(kSharing, kNorm != Norm::kNone, kIsTable, kM);
    if constexpr (kSharing != Sharing::kWhole && direct::has_one_block(kNorm != Norm::kNone, kM))
      if (layout.blocks == 1)
        return launch(gemv_direct<kFormat, kBits, Lanes<kBits, kSharing, 1>, kM, X, kNorm>);
    return launch(gemv_direct<kFormat, kBits, Lanes<kBits, kSharing, kMost>, kM, X, kNorm>);
  }
};

}  // namespace jaxgemv::cuda
