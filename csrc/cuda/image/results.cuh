// From the sums of a CTA's warps to y: shares of K added, the norm's factor, the epilogue.
#pragma once

#include "weights.cuh"

namespace jaxgemv::cuda::image {

constexpr int kMostRanks = 8;
constexpr int kPair = 8;  // from a row of a gated activation to the one it is paired with

// How a CTA's sums lie: by share of K, then column, then row; rows are neighbours so that other CTAs of a cluster read
// whole lines. Rows g and columns 2 t of a warp are in different banks.
template <typename S>
struct Placing {
  int pitch, of_share;

  __device__ __forceinline__ explicit Placing(const Params& params)
      : pitch(params.across * S::kRows + 4), of_share(S::kColumns * pitch) {}

  __device__ __forceinline__ int of(int share, int column, int row) const {
    return share * of_share + column * pitch + row;
  }
};

// Bytes of the sums of all warps, at most.
template <typename S>
JAXGEMV_HD constexpr int sums_bytes(int across, int deep) {
  return deep * S::kColumns * (across * S::kRows + 4) * 4;
}

// partial: the sums of all warps, as Placing has them. factors: for the norm, each row's sum of squares over this CTA's
// share of K. warps: those that call this. Shares of K, and the columns of a row of x, are added in a fixed order:
// first those of this CTA, into the first of them, and in a cluster then those of all CTAs.
template <typename S>
__device__ __forceinline__ void put_results(const Params& params, const Share& own, int tile,
                                            float* partial, const float* factors, int warps) {
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const Placing<S> sums(params);
  const int log_warp = params.log_rows + (S::kRowTiles > 1), results = params.across << log_warp;
  const int chunks = (results + 31) / 32;
  // A warp takes 32 rows of the weights, and every `step`th row of x: use(m, where its first sum lies).
  const auto for_each = [&](int warp, int warps, auto&& begin) {
    const int step = warps / chunks, first = warp / chunks, row = warp % chunks * 32 + lane;
    if (first >= step || row >= results) return;
    const int of_warp = row & ((1 << log_warp) - 1);
    const int tile_row = of_warp >> params.log_rows << 4 | (of_warp & ((1 << params.log_rows) - 1));
    float* at =
        partial + first * params.parts * sums.pitch + (row >> log_warp) * S::kRows + tile_row;
    const auto use = begin(row);
#pragma unroll 1
    for (int m = first; m < own.M; m += step, at += step * params.parts * sums.pitch) use(m, at);
  };
  const auto sum_of_shares = [&](const float* from) {
    const auto columns = [&] { return params.parts == 2 ? from[0] + from[sums.pitch] : from[0]; };
    float sum = columns();
#pragma unroll 1
    for (int w = 1; w < params.deep; ++w) from += sums.of_share, sum += columns();
    return sum;
  };
  const bool gated = is_gated(params.output.activation);
  if (params.ranks > 1) {
    if (params.deep * params.parts > 1)
      for_each(warp, warps, [&](int) {
        return [&](int, float* at) {
          *at = sum_of_shares(at);
          if (gated) at[kPair] = sum_of_shares(at + kPair);
        };
      });
    sync_cluster();
  }
  // All loads are issued before the first sum is used.
  const auto over_ranks = [&](const float* from) {
    float of_rank[kMostRanks], sum = 0;
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r)
      of_rank[r] = r < params.ranks ? load_of_rank(from, r) : 0.f;
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) sum += of_rank[r];
    return sum;
  };
  for_each(own.rank * warps + warp, params.ranks * warps, [&](int row) {
    const int n = tile * results + row;
    const bool inside = n < params.width;
    const float bias = inside ? bias_of(params.output, own.s >= 0, own.s, n) : 0.f;
    const float second =
        inside && gated ? bias_of(params.output, own.s >= 0, own.s, n + params.width) : 0.f;
    float worth[2] = {S::kWorth, S::kWorth};
    if constexpr (S::kHasGlobalScale)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        worth[half] *= global_scale_of(params.output, inside && own.s >= 0 && half <= gated, own.s,
                                       n + half * params.width);
    return [=, &own, &params](int m, const float* from) {
      if (!inside) return;
      float factor = 1;
      if (params.x.norm.data != nullptr)
        factor *= norm_factor(params.ranks > 1 ? over_ranks(factors + m) : factors[m], params.x.K,
                              params.eps);
      const auto result = [&](const float* from, float worth, float bias) {
        return (params.ranks > 1 ? over_ranks(from) : sum_of_shares(from)) * (factor * worth) +
               bias;
      };
      const float sum = result(from, worth[0], bias);
      const Index at = (own.first_row + m) * params.width + n;
      if (params.plain)
        store(params.output.y, params.output.dtype, at, sum);
      else
        finish<Parts::kNormAndEpilogue>(params.output, at, sum,
                                        gated ? result(from + kPair, worth[1], second) : 1);
    };
  });
  if (params.ranks > 1) leave_cluster();
}

}  // namespace jaxgemv::cuda::image
