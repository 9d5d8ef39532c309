// From the sums of a CTA's warps to y, four results at a time: shares of K added, those of a cluster too.
//
// Each CTA of a cluster finishes some rows of x. The others send it their sums of these, and its barrier tells when all
// are there: no CTA has to wait for memory, as behind a fence, nor for what others still read.
#pragma once

#include "../image/fours.cuh"
#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// rows: of x, that a CTA of a cluster finishes at most. magic: m * magic >> 16 is m / rows, the CTA that finishes row m
// of x; exact up to 64 rows.
struct RowsEach {
  int rows, magic;
};
JAXGEMV_HD constexpr RowsEach rows_each(int rows, int ranks) {
  const int each = (rows + ranks - 1) / ranks;
  return {each, (0xffff + each) / each};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// partial: the sums of all warps, as Placing has them. factors: for the norm, sums of squares. sent: the barrier that
// counts what other CTAs send.
template <typename S>
__device__ __forceinline__ void gather(const Params& params, const Share& own, int tile,
                                       RowsEach each, float* partial, const float* factors,
                                       uint32_t sent) {
  const int gated = is_gated(params.output.activation), thread = threadIdx.x,
            fours = params.across * S::kRows / 4 >> gated, log_fours = 32 - __clz(fours - 1),
            four = thread & (1 << log_fours) - 1;
  const bool idle = four >= fours;  // with three groups of warps: no rows
  const Fours<S, true> mine(params, own, idle ? params.tiles : tile, fours, four,
                            thread >> log_fours, S::kConsumers >> log_fours);
  const bool alone = params.ranks == 1;
  const int begin = alone ? 0 : own.rank * each.rows,
            rows = alone ? own.M : min(max(own.M - begin, 0), each.rows);
  // Where the sums lie that CTA `rank` sends, for row `row` of those that the receiving CTA finishes.
  const uint32_t here = shared_address(partial) + sums_bytes<S>(params.across, params.deep);
  const auto place = [&](int rank, int row, bool up) {
    return here + ((((rank * each.rows + row) << gated | up) << log_fours) + four) * 16;
  };
  if (!alone) {
    if (thread == 0) arrive_and_expect(sent, ((params.ranks - 1) * rows * fours * 16) << gated);
    wait_for_cluster();  // all have used what lay there
    const float* from = mine.at(partial, mine.first);
#pragma unroll 1
    for (int m = idle ? own.M : mine.first; m < own.M; m += mine.step, from += mine.next()) {
      const int to = m * each.magic >> 16;
      if (to == own.rank) continue;
#pragma unroll 1
      for (int up = 0; up <= gated; ++up)
        send(address_of_rank(place(own.rank, m - to * each.rows, up), to), mine.of_shares(from, up),
             address_of_rank(sent, to));
    }
    wait(sent, 0);
  }
  mine.with_put([&](auto&& put) {
    const float* from = mine.at(partial, begin + mine.first);
    Index at = mine.of_y(begin + mine.first);
#pragma unroll 1
    for (int row = mine.first; row < rows;
         row += mine.step, from += mine.next(), at += mine.next_of_y()) {
      const float factor = params.x.norm.data != nullptr
                               ? norm_factor(factors[begin + row], params.x.K, params.eps)
                               : 1.f;
      put(at, factor, [&](bool up) {
        if (alone) return mine.of_shares(from, up);
        float4 sum{};
#pragma unroll 2
        for (int rank = 0; rank < params.ranks; ++rank) {
          const uint4 v = load_shared16(place(rank, row, up));
          add4(sum, rank == own.rank ? mine.of_shares(from, up)
                                     : float4{__uint_as_float(v.x), __uint_as_float(v.y),
                                              __uint_as_float(v.z), __uint_as_float(v.w)});
        }
        return sum;
      });
    }
  });
}

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
