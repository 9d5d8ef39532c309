// What the products of the wgmma_tma kernel leave out, where scales are part of operand A: scales far below the largest
// of their row, and all of a table that is not E2M1. Rare, so each warp adds it for its rows alone, from global memory.
#pragma once

#include "operand_scales.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Adds to y the products, for tile `tile` of 16 rows, of codes whose scale was left out (left_only), or of all;
// `entry`: this lane's of the table. An mma has 16 codes of one group: lane t has pair t of two octets, which the image
// has in another lane's place.
template <typename S, int kCount>
__device__ __forceinline__ void add_left_over(const Params& params, const Share& own,
                                              const Image& image, int tile, int share, int units,
                                              const OperandScales<S>& scales, bool left_only,
                                              const HalvesOfEntry& entry, float (&y)[kCount]) {
  constexpr int kSteps = kQuadK / 16;  // of a quad
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint8_t* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    rows[h] = params.row(own.s, params.row_of(tile, row_of_lane<S>() + 8 * h));
  wait_for_earlier();  // for x: until here other threads have waited
#pragma unroll 1
  for (int i = 0; i < units * S::kQuads * kSteps; ++i) {
    const int quad = i / kSteps, step = i % kSteps, run = step / 2, half = step % 2;
    const int k = (own.first_unit * S::kQuads + quad) * kQuadK + step * 16;
    if (quad / S::kQuads % params.deep != share || k >= params.x.K) continue;
    uint2 octets[2];
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      octets[h] = load8(rows[h] + k / 2);
      f[h] = scales.scale_of(h, k / 32, half, left_only) * entry.unit;
    }
    if (!__any_sync(~0u, f[0] != 0 || f[1] != 0)) continue;
    const uint8_t* const b = image.record(own.first_unit * S::kQuads + quad) + run * 4 +
                             ((half * 8 + t) * S::kColumns + g) * 16;
#pragma unroll 1
    for (int part = 0; part < 1 + entry.has_second; ++part) {
      const auto pair = [&](uint32_t octet) {
        const uint32_t first = __shfl_sync(~0u, entry.both, octet >> (4 * t) & 15),
                       second = __shfl_sync(~0u, entry.both, octet >> (4 * t + 16) & 15);
        return __byte_perm(first, second, part == 0 ? 0x5410 : 0x7632);
      };
      const uint32_t a[4] = {pair(octets[0].x), pair(octets[1].x), pair(octets[0].y),
                             pair(octets[1].y)};
#pragma unroll
      for (int c = 0; c < S::kColumns / 8; ++c) {
        const auto* const at = reinterpret_cast<const uint32_t*>(b + c * 128);
        float dot[4] = {};
        mma_m16n8k16<__half>(dot, a[0], a[1], a[2], a[3], {at[0], at[S::kColumns * 16]});
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (f[e / 2] != 0) y[4 * c + e] = fmaf(f[e / 2], dot[e], y[4 * c + e]);
      }
    }
  }
}

// When all products are added: scales the sums of E2M1, or drops them for another table, and adds what is left over.
template <typename S, int kCount>
__device__ __forceinline__ void finish(const Params& params, const Share& own, const Image& image,
                                       int tile, int share, int units,
                                       const OperandScales<S>& scales, float (&y)[kCount]) {
  const float mine = scales.entry(), factor = factor_of_e2m1(mine);
  const float worth[2] = {scales.worth(0, factor), scales.worth(1, factor)};
#pragma unroll
  for (int e = 0; e < kCount; ++e) y[e] = factor != 0 ? y[e] * worth[e / 2 % 2] : 0;
  if (factor == 0 || scales.has_left())
    add_left_over(params, own, image, tile, share, units, scales, factor != 0,
                  HalvesOfEntry(mine, params.x.lets_round()), y);
}

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
