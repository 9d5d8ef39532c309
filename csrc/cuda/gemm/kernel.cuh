// More rows of x than the others are for, on Hopper: a product with the dequantised weights, each
// rounded once to x's dtype, that never writes them anywhere but into registers.
//
// A CTA has 64 rows of the weights for each of its groups of four warps, and 128 of x; the CTAs of a
// cluster share K. Weights and their scales come as in mma_any, through a ring of each warp. A lane
// makes its part of operand A of them; one more thread brings x, as image.cuh lays it out, through
// stages that all groups share.
#pragma once

#include "../common/grid.cuh"
#include "../image/fours.cuh"
#include "image.cuh"

namespace jaxgemv::cuda::gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies x, stage by stage, in one thread.
template <typename S>
__device__ __forceinline__ void bring_x(const Params& params, const Share& own, uint32_t to,
                                        uint32_t full, uint32_t empty) {
  constexpr int kUnitStages = S::kQuads * kBlocks / S::kStageBlocks;
  const int bytes = own.columns * (S::kStageBlocks * S::kGranules * 16);
  const uint8_t* image =
      params.image + (own.first_row * params.units + own.first_unit * Index{own.columns}) *
                         (kUnitStages * S::kStageBlocks * S::kGranules * 16);
  const int stages = (own.last_unit - own.first_unit) * kUnitStages;
#pragma unroll 1
  for (int i = 0; i < stages; ++i, image += bytes) {
    const int stage = i % S::kXStages;
    if (i >= S::kXStages) wait(empty + 8 * stage, i / S::kXStages % 2 ^ 1);
    arrive_and_expect(full + 8 * stage, bytes);
    copy_bulk(to + stage * S::kXStageBytes, image, bytes, full + 8 * stage);
  }
}

#endif

template <Format kFormat, int kBits, typename X, typename S = Shape<kFormat, kBits, X>>
__global__ void __launch_bounds__(S::threads(S::kMostGroups), 1)
    gemv_gemm(const Params params, bool packs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename S::C;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[2 * S::kXStages];
  __shared__ float table[C::kEntries > 0 ? C::kEntries : 1];
  const uint32_t full = shared_address(barriers), empty = full + 8 * S::kXStages;
  const int lane = threadIdx.x % 32;
  const int warp = uniform(threadIdx.x / 32);
  Share own(params);
  if (own.s < 0) own.last_unit = own.first_unit;
  const int of_warp = own.cluster / params.m_tiles * params.across + warp;  // tile of rows
  const int ring_bytes = S::bytes(params.windows.pieces);
  const uint32_t x = shared_address(shared + params.across * ring_bytes);

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kXStages; ++i)
      init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, params.across);
    fence_barrier_init();
  }
  if constexpr (C::kEntries > 0)
    if (own.s >= 0) C::make_table(params.codebook, own.s, table);
  __syncthreads();
  if (warp >= params.across) {
    setmaxnreg_dec<S::kRegistersOfCopies>();
    if (threadIdx.x == 32 * params.across) {
      wait_for_earlier();  // also if own.s < 0: this kernel must not end before the one in front
      bring_x<S>(params, own, x, full, empty);
    }
    return;
  }
  setmaxnreg_inc<S::kRegisters>();
  Sums<kFormat, kBits, X> sums(table);
  if (own.first_unit < own.last_unit) {
    uint8_t* const ring = shared + warp * ring_bytes;
    Weights<S> weights(params, own.s, own.cluster / params.m_tiles, warp, 0, own.first_unit,
                       own.last_unit, ring);
    Window<S> window(params, ring);
    int of_lane[2];  // bytes from a stage to its rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      const uint8_t* const from = params.row(own.s, params.row_of(of_warp, row));
      of_lane[h] = row * S::kPitch + static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    }
    int first_group = 0, inside = 0;
    const auto terms = [&](int k) {
      return weights.scales()[0].terms(window.at, inside, params.groups.of(k) - first_group,
                                       params.scales, params.shift);
    };
    // Descriptors of x; the bits of an address above 18 are the number of a CTA in its cluster.
    const uint32_t first_x = static_cast<uint32_t>(own.columns) << 16 | (x & 0x3ffff) >> 4;
    uint32_t full_here = full, x_here = first_x;
    int parity = 0;
    uint32_t last = 0;  // the empty barrier of the stage before
    // Adds the quad that begins at k, `words` words into the rows. kWhole: all of it has the same terms.
    const auto add_quad = [&]<bool kWhole>(const uint32_t* const(&rows)[2], int words, int k) {
      if constexpr (kWhole) sums.set(terms(k));
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if constexpr (!kWhole) {
          Terms now = terms(k + j * kBlockK);
          if (params.groups.slots == 8) {
            const Terms second = terms(k + j * kBlockK + 16);
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if (lane % 4 >= 2) now.f[h] = second.f[h], now.c[h] = second.c[h];
          }
          sums.set(now);
        }
        const int block = j % S::kStageBlocks;
        if (block == 0) wait(full_here, parity);
        sums.template add<kWhole && C::kRuns>(
            rows, words, j, x_here + block * S::kGranules * own.columns, own.columns, [&] {
              if (block == S::kPending && last != 0 && lane == 0) arrive(last);
            });
        if (block + 1 < S::kStageBlocks) continue;
        last = full_here + 8 * S::kXStages;
        full_here += 8, x_here += S::kXStageBytes / 16;
        if (full_here == empty) full_here = full, x_here = first_x, parity ^= 1;
      }
    };
#pragma unroll 1
    for (int unit = own.first_unit - (S::kStages - 1); unit < own.last_unit; ++unit) {
      weights.next();
      if (unit < own.first_unit) continue;
      wait_copies<S::kStages - 1>();
      __syncwarp();
      const uint32_t* rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rows[h] = reinterpret_cast<const uint32_t*>(weights.stage + of_lane[h]);
      if (window.opens(unit)) {
        first_group = window.first();
        inside = weights.scales()[0].inside(first_group);
      }
#pragma unroll 1
      for (int q = 0; q < S::kQuads; ++q) {
        const int k = (unit * S::kQuads + q) * kQuadK;
        if (params.groups.slots == 1)
          add_quad.template operator()<true>(rows, q * 4 * kBits, k);
        else
          add_quad.template operator()<false>(rows, q * 4 * kBits, k);
        __syncwarp();
      }
    }
    sums.finish();
  }

  // The sums take the place of rings and x, which all warps have to have read.
  const int consumers = 32 * params.across;
  sync_threads(consumers);
  float* const partial = reinterpret_cast<float*>(shared);
  const Placing<S> placing(params);
#pragma unroll
  for (int e = 0; e < S::kColumns / 2; ++e)
    partial[placing.of(0, e / 4 * 8 + lane % 4 * 2 + e % 2,
                       warp * kTileN + lane / 4 + e / 2 % 2 * 8)] = sums.y[e];
  sync_threads(consumers);
  const int tile = own.cluster / params.m_tiles;
  if (packs)
    put_fours<S>(params, own, tile, partial, consumers);
  else
    put_results<S>(params, own, tile, partial, nullptr, params.across);
#endif
}

}  // namespace jaxgemv::cuda::gemm
