// Chooses the variant of the direct kernel, and lays out its work.
#pragma once

#include <algorithm>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {
namespace direct {

// Tiles of eight rows of x that a warp has at most: registers end there.
template <typename X>
inline constexpr int kMostTilesM = std::is_same_v<X, float> ? 1 : 2;

// log_octets: of a lane in a unit. Four lie side by side in a lane, fewer in four lanes.
struct Layout {
  int tiles_m = 0, log_octets = 0, log_across = 0, log_deep = 0, log_ranks = 0, units = 0;
  Index tiles = 0;
  int parts = 1;  // of x, that cost as much as so many

  int ranks() const { return 1 << log_ranks; }
};

inline Norm norm_of(const Problem& problem, const Operands& operands) {
  if (operands.norm.data == nullptr) return Norm::kNone;
  const bool is_short = problem.x == Dtype::kBF16 && operands.norm.dtype == Dtype::kBF16;
  return is_short ? Norm::kShort : Norm::kAny;
}

// Nanoseconds of a layout on an H200, roughly: of all instructions of an SM, or of those of a warp and
// its waits for memory, as often as CTAs follow one another. Fitted to the times of all layouts of
// some fifty products: what it chooses takes 1% longer than the best ("Small matrices").
inline Index cost_of(const Layout& layout, const Problem& problem, const Device& device) {
  constexpr int kMemoryNs = 350, kClusterNs = 1400, kRankNs = 250, kWarps = 16;  // of an SM
  const int warps = 1 << (layout.log_across + layout.log_deep);
  const Index steps = ceil_div(layout.units, 1 << layout.log_deep);
  // To find an octet's codes in a table, for both rows.
  const int look_up = problem.format == Format::kCodebook ? 56 : 0;
  const Index instructions =
      250 + steps * (70 + (45 + look_up + 14 * layout.tiles_m * layout.parts << layout.log_octets));
  const Index ctas =
      layout.tiles * layout.ranks() * ceil_div(problem.M, layout.tiles_m * kTileM) * problem.batch;
  const Index on_sm = ceil_div(ctas, device.sms) * warps;
  const Index issue = on_sm * instructions / 4;
  const Index alone = ceil_div(on_sm, kWarps) * (instructions * 9 / 5 + steps * kMemoryNs);
  return std::max(issue, alone) + instructions / 3 +
         (layout.log_ranks > 0 ? kClusterNs + kRankNs * layout.ranks() : 0);
}

// Groups of half a block, of tables.
constexpr int kHalfBlock = kBlockK / 2;

inline bool has_halves(const Problem& problem, const Operands& operands) {
  return problem.format == Format::kCodebook && problem.group == kHalfBlock &&
         !has_one_group(problem, operands);
}

// The one that costs least.
inline Layout layout_of(const Problem& problem, const Operands& operands, const Device& device) {
  const bool one = has_one_group(problem, operands);
  const Norm norm = norm_of(problem, operands);
  const bool is_wide = problem.x == Dtype::kF32;
  const int most_tiles_m =
      is_wide || norm != Norm::kNone ? kMostTilesM<float> : kMostTilesM<__half>;
  const int parts = norm == Norm::kAny ? 8 : is_wide ? 3 : norm == Norm::kShort ? 2 : 1;
  const bool halves = has_halves(problem, operands);
  const bool whole = problem.format != Format::kCodebook && problem.K % kBlockK == 0 &&
                     is_aligned(operands.packed, 16);
  Layout best;
  Index least = 0;
  for (int tiles_m = 1; tiles_m <= most_tiles_m; ++tiles_m)
    for (int log_octets = 0; log_octets < 2 + whole; ++log_octets) {
      if (!one && problem.group % (kBlockK << log_octets) != 0 && !(halves && log_octets == 0))
        break;
      const Index all = ceil_div(problem.K, kBlockK << log_octets);  // units
      for (int log_ranks = 0; log_ranks <= (device.major >= 9 ? 3 : 0); ++log_ranks) {
        const Index units = ceil_div(all, 1 << log_ranks);
        for (int log_across = 0; 1 << log_across <= kMaxWarps; ++log_across)
          for (int log_deep = 0; 1 << (log_across + log_deep) <= kMaxWarps; ++log_deep) {
            if (1 << log_deep > units) break;
            const Layout layout = {tiles_m,
                                   log_octets,
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
  p.octets = 1 << layout.log_octets, p.units = layout.units;
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

  // Whole octets of x, no group boundary inside a block but in its middle, and 32-bit m, n and k.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    const bool halves = direct::has_halves(problem, operands);
    return problem.K % kOctet == 0 && is_aligned(operands.x, 16) &&
           is_aligned(operands.norm.data, 16) &&
           has_weight_source(problem, operands, halves ? direct::kHalfBlock : direct::kBlockK);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    using direct::Norm, direct::Sharing;
    const direct::Layout layout = direct::layout_of(problem, operands, device);
    const direct::Params params = direct::params_of(problem, operands, layout);
    const Index tiles_m = ceil_div(problem.M, layout.tiles_m * direct::kTileM);
    const LaunchShape shape{{static_cast<unsigned>(layout.tiles * layout.ranks()),
                             static_cast<unsigned>(problem.batch), static_cast<unsigned>(tiles_m)},
                            32 << (layout.log_across + layout.log_deep),
                            /*shared_bytes=*/0,
                            layout.ranks()};
    const auto launch = [&]<Sharing kSharing>() {
      const auto run = [&](auto kernel) {
        return launch_kernel(kernel, shape, device, stream, params);
      };
      using direct::gemv_direct;
      const Norm norm = direct::norm_of(problem, operands);
      if constexpr (std::is_same_v<X, __nv_bfloat16>)
        if (norm == Norm::kShort)
          return run(gemv_direct<kFormat, kBits, kSharing, 1, X, Norm::kShort>);
      if (norm == Norm::kAny) return run(gemv_direct<kFormat, kBits, kSharing, 1, X, Norm::kAny>);
      if (layout.tiles_m == 1) return run(gemv_direct<kFormat, kBits, kSharing, 1, X, Norm::kNone>);
      return run(gemv_direct<kFormat, kBits, kSharing, kTilesM, X, Norm::kNone>);
    };
    // Of four octets in a lane, or of two groups.
    constexpr Sharing kOther = kIsTable ? Sharing::kHalves : Sharing::kWhole;
    const bool other = kIsTable ? direct::has_halves(problem, operands) : layout.log_octets == 2;
    return other ? launch.template operator()<kOther>()
                 : launch.template operator()<Sharing::kBeside>();
  }
};

template <Format kFormat, int kBits>
inline constexpr Kernel kDirectRows[] = {row<Direct<kFormat, kBits, __half>>(),
                                         row<Direct<kFormat, kBits, __nv_bfloat16>>(),
                                         row<Direct<kFormat, kBits, float>>()};

}  // namespace jaxgemv::cuda
