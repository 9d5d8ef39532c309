// Lays out the work of the gemm_tma kernel.
#pragma once

#include <algorithm>
#include <limits>

#include "../common/clusters.cuh"
#include "../common/tensor_map.h"
#include "../image/prepare.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
class GemmTma {
 public:
  static constexpr KernelInfo kInfo{"gemm_tma",  kFormat, kBits,
                                    kDtypeOf<X>, 256,     image::rounded_operands(kFormat)};

  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    return problem.rounded && has_hopper_code(device) && image::takes(problem, operands) &&
           image::slots_of(problem, operands) <=
               gemm_tma::Shape<kFormat, kBits, X, 128>::kMostSlots &&
           has_map_of_bytes(problem, operands) && problem.K % kChunk == 0 &&
           is_aligned(operands.x, 16) && plan(problem, device).ranks > 0;
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const Plan plan = GemmTma::plan(problem, device);
    return plan.columns == 128 ? launch<128>(problem, operands, plan, device, stream)
                               : launch<256>(problem, operands, plan, device, stream);
  }

 private:
  static constexpr Index kChunk = 16 / sizeof(X);  // numbers that are 16 bytes

  // Rows of x of a CTA (columns), CTAs that decode for each other (pair), CTAs that share K (ranks; 0: none can), and
  // how many such clusters there may be at once.
  struct Plan {
    int columns = 0, pair = 1, ranks = 0, clusters = 0;
    Index ns = std::numeric_limits<Index>::max();
  };

  // Nanoseconds on an H200, int4 in groups of 128 ("Decoded by warps of their own" in docs/cuda-notes.md): for a stage,
  // for a CTA, for each of its further tiles, and what sharing K adds.
  template <int kColumns>
  static void consider(const Problem& problem, const Device& device, int pair, Plan* best) {
    using S = gemm_tma::Shape<kFormat, kBits, X, kColumns>;
    constexpr auto kKernel = gemm_tma::gemv_gemm_tma<kFormat, kBits, X, kColumns>;
    constexpr bool kIsWide = kColumns > 128;
    constexpr int kStartNs = kIsWide ? 4000 : 2700, kNextNs = kIsWide ? 2400 : 1600,
                  kClusterNs = kIsWide ? 5000 : 3800;
    const int stage_ns = pair > 1 ? 640 : (kIsWide ? 680 : 460);
    if (S::kSharedBytes + 2048 > device.shared_bytes) return;
    const auto clusters =
        resident_clusters<image::kMostRanks>(kKernel, {{}, S::kThreads, S::kSharedBytes}, device);
    const Index tiles = ceil_div(problem.N, Index{gemm_tma::kTileRows}) *
                        ceil_div(problem.M, Index{kColumns} * pair) * problem.batch;
    const Index units = ceil_div(problem.K, Index{S::kUnitK});
    for (int ranks = 1; ranks * pair <= image::kMostRanks && ranks <= units; ++ranks) {
      if (clusters[ranks * pair] < 1) continue;
      const Index rounds = ceil_div(tiles, Index{clusters[ranks * pair]});
      const Index ns =
          (ranks > 1 ? rounds * (kStartNs + kClusterNs) : kStartNs + (rounds - 1) * kNextNs) +
          rounds * ceil_div(units, Index{ranks}) * (S::kUnitK / S::kStageK) * stage_ns;
      if (ns < best->ns) *best = {kColumns, pair, ranks, clusters[ranks * pair], ns};
    }
  }

  static Plan plan(const Problem& problem, const Device& device) {
    Plan best;
    consider<128>(problem, device, 1, &best);
    if (problem.M > 128) consider<256>(problem, device, 1, &best);
    if (problem.M > 256) consider<256>(problem, device, 2, &best);
    return best;
  }

  // How E2M1Row could load the scales of a table of 16, E2M1 or not.
  static gemm_tma::QuadScales quad_scales(const Problem& problem, const Operands& operands) {
    constexpr bool kMayBeE2M1 = kFormat == Format::kCodebook && kBits == 4 && sizeof(X) == 2;
    const Param& scale = operands.scale;
    const bool fits = kMayBeE2M1 && !is_wide(scale.dtype) && scale.g_stride == 1 &&
                      (problem.group == 16 || problem.group == 32);
    for (const int piece : {4, 2})
      if (fits && is_aligned(scale.data, piece) && scale.n_stride % piece == 0 &&
          scale.stack_stride % piece == 0 && ceil_div(problem.K, problem.group) % piece == 0)
        return {static_cast<int>(image::kQuadK / problem.group), piece};
    return {};
  }

  // Groups of 128 and more take a load per turn, which is no slower than to find out whether one is needed.
  template <typename S>
  static gemm_tma::Loads loads_of(const Problem& problem, const Operands& operands,
                                  const image::Groups& groups) {
    constexpr Index kQuadK = image::kQuadK;
    const bool regular = groups.slots > 1 && kQuadK % problem.group == 0;
    const Index of_quad = regular ? kQuadK / problem.group : groups.slots;
    const auto fits = [&](const Param& param) {
      const Index size = size_of(param.dtype);
      return regular && groups.last > 0 && param.g_stride == 1 && of_quad * size <= 8 &&
             is_aligned(param.data, 8) && param.n_stride * size % 8 == 0 &&
             param.stack_stride * size % 8 == 0;
    };
    return {static_cast<int>(S::kMostSlots / of_quad),
            {fits(operands.scale), fits(operands.shift)}};
  }

  template <int kColumns>
  static cudaError_t launch(const Problem& problem, const Operands& operands, const Plan& plan,
                            const Device& device, cudaStream_t stream) {
    using S = gemm_tma::Shape<kFormat, kBits, X, kColumns>;
    const Index tiles = ceil_div(problem.N, Index{gemm_tma::kTileRows});
    const image::Layout layout{S::kConsumers, 1, plan.ranks, 0, S::kSharedBytes, false, tiles};
    image::Params p =
        image::params_of<S>(problem, operands, layout, kBits, kColumns * plan.pair, /*parts=*/1);
    image::make_even(&p);
    CUtensorMap weights, x;
    cudaError_t status = map_of_bytes(problem, operands, p.row_bytes, S::kRowBytes,
                                      gemm_tma::kTileRows / plan.pair, &weights);
    if (status == cudaSuccess)
      status = map_of_x(problem, operands, gemm_tma::rows_of_x(p.rows_m, plan.pair), &x);
    if (status != cudaSuccess) return status;
    const bool packs =
        p.output.dtype == kDtypeOf<X> && p.width % 2 == 0 && is_aligned(p.output.y, 2 * sizeof(X));
    // Results that are added up in shared memory need the place of the next tile: then each CTA has one tile only.
    const Index tiles_of_all = Index{p.tiles} * p.m_tiles;
    const Index running = packs && p.ranks == 1
                              ? std::clamp<Index>(plan.clusters / problem.batch, 1, tiles_of_all)
                              : tiles_of_all;
    const LaunchShape shape{{static_cast<unsigned>(running * p.ranks * plan.pair),
                             static_cast<unsigned>(problem.batch)},
                            S::kThreads,
                            S::kSharedBytes,
                            p.ranks * plan.pair};
    return launch_kernel(gemm_tma::gemv_gemm_tma<kFormat, kBits, X, kColumns>, shape, device,
                         stream, p, weights, x, plan.pair, loads_of<S>(problem, operands, p.groups),
                         quad_scales(problem, operands), packs);
  }
};

}  // namespace jaxgemv::cuda
