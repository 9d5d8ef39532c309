// From the sums of a CTA's warps to y, four results at a time.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// One or four neighbours of shared memory, here or in CTA `rank` of the cluster.
template <typename T>
__device__ __forceinline__ T load_as(const float* from) {
  return *reinterpret_cast<const T*>(from);
}
template <typename T>
__device__ __forceinline__ T load_of_rank_as(const float* from, int rank) {
  if constexpr (std::is_same_v<T, float4>)
    return load4_of_rank(from, rank);
  else
    return load_of_rank(from, rank);
}
__device__ __forceinline__ void add(float& to, float v) { to += v; }
__device__ __forceinline__ void add(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// As put_results of mma_any, but four rows of the weights at a time, for which wgmma_any's kernels of tables would
// keep registers in memory.
template <typename S>
__device__ __forceinline__ void put_fours(const Params& params, const Share& own, int tile,
                                          float* partial, const float* factors, bool packs) {
  const Placing<S> sums(params);
  const int log_warp = params.log_rows + (S::kRowTiles > 1), results = params.across << log_warp;
  const int fours = results / 4;
  // A thread takes four rows of the weights and one of x at a time: use(m, the first row, its first sum).
  const auto for_each = [&](int first, int step, auto&& use) {
    const int rows_on = step / fours, fours_on = step - rows_on * fours;
    int m = first / fours, four = first - m * fours;
#pragma unroll 1
    while (m < own.M) {
      const int row = four * 4, of_warp = row & ((1 << log_warp) - 1);
      const int tile_row =
          of_warp >> params.log_rows << 4 | (of_warp & ((1 << params.log_rows) - 1));
      use(m, row,
          partial + m * params.parts * sums.pitch + (row >> log_warp) * S::kRows + tile_row);
      m += rows_on, four += fours_on;
      if (four >= fours) four -= fours, ++m;
    }
  };
  const auto sum_of_shares = [&]<typename T>(const float* from, T) {
    T sum = load_as<T>(from);
    if (params.parts == 2) add(sum, load_as<T>(from + sums.pitch));
#pragma unroll 1
    for (int w = 1; w < params.deep; ++w) {
      from += sums.of_share;
      add(sum, load_as<T>(from));
      if (params.parts == 2) add(sum, load_as<T>(from + sums.pitch));
    }
    return sum;
  };
  const bool gated = is_gated(params.output.activation);
  constexpr int kPair = 8;  // from a row to the one it is paired with
  const int thread = threadIdx.x, threads = S::kConsumers;
  if (params.ranks > 1) {
    for_each(thread, threads, [&](int, int, float* at) {
      *reinterpret_cast<float4*>(at) = sum_of_shares(at, float4{});
      if (gated) *reinterpret_cast<float4*>(at + kPair) = sum_of_shares(at + kPair, float4{});
    });
    __syncwarp();
    sync_cluster();
  }
  const auto total = [&]<typename T>(const float* from, T sum) {
    if (params.ranks == 1) return sum_of_shares(from, sum);
    T of_rank[kMostRanks];  // all are asked for before the first is there
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r)
      of_rank[r] = r < params.ranks ? load_of_rank_as<T>(from, r) : T{};
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) add(sum, of_rank[r]);
    return sum;
  };
  const bool has_bias = params.output.bias.data != nullptr;
  const auto bias = [&](int n) {
    return own.s < 0 ? NAN : has_bias ? bias_of(params.output, true, own.s, n) : 0.f;
  };
  for_each(own.rank * threads + thread, params.ranks * threads,
           [&](int m, int row, const float* from) {
             const int n = tile * results + row, count = min(params.width - n, 4);
             float factor = S::kWorth;
             if (params.x.norm.data != nullptr) {
               float squares = 0;
               for (int r = 0; r < params.ranks; ++r)
                 squares += params.ranks > 1 ? load_of_rank(factors + m, r) : factors[m];
               factor *= norm_factor(squares, params.x.K, params.eps);
             }
             const Index at = (own.first_row + m) * params.width + n;
             if (packs && count == 4) {
               const float4 sum = total(from, float4{});
               return store4(params.output.y, params.output.dtype, at,
                             {fmaf(sum.x, factor, bias(n)), fmaf(sum.y, factor, bias(n + 1)),
                              fmaf(sum.z, factor, bias(n + 2)), fmaf(sum.w, factor, bias(n + 3))});
             }
#pragma unroll 1
             for (int i = 0; i < count; ++i) {
               const float sum = fmaf(total(from + i, 0.f), factor, bias(n + i));
               float up = 1;
               if (gated)
                 up = fmaf(total(from + i + kPair, 0.f), factor, bias(n + i + params.width));
               if (params.plain)
                 store(params.output.y, params.output.dtype, at + i, sum);
               else
                 finish<Parts::kNormAndEpilogue>(params.output, at + i, sum, up);
             }
           });
  __syncwarp();
  if (params.ranks > 1) sync_cluster();  // the others have read this CTA's sums
}

}  // namespace jaxgemv::cuda::wgmma_tma
