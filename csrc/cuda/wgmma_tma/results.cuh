// From the sums of a CTA's warps to y, four results at a time.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void add4(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// What put_results of mma_any does, where there is nothing behind the sums but a bias, and y has 16 bits and whole
// fours of results: a thread takes four rows of the weights and one of x. (Part of put_results, this made
// wgmma_any's kernels of tables keep registers in memory.)
template <typename S>
__device__ __forceinline__ void put_fours(const Params& params, const Share& own, int tile,
                                          float* partial, const float* factors) {
  const Placing<S> sums(params);
  const int results = params.across * S::kRows, fours = results / 4;
  // use(m, the first row, its first sum)
  const auto for_each = [&](int first, int step, auto&& use) {
    const int rows_on = step / fours, fours_on = step - rows_on * fours;
    int m = first / fours, four = first - m * fours;
#pragma unroll 1
    while (m < own.M) {
      use(m, four * 4, partial + m * params.parts * sums.pitch + four * 4);
      m += rows_on, four += fours_on;
      if (four >= fours) four -= fours, ++m;
    }
    __syncwarp();
  };
  const auto sum_of_shares = [&](const float* from) {
    float4 sum{};
#pragma unroll 1
    for (int w = 0; w < params.deep; ++w, from += sums.of_share) {
      add4(sum, load4(from));
      if (params.parts == 2) add4(sum, load4(from + sums.pitch));
    }
    return sum;
  };
  const int thread = threadIdx.x;
  if (params.ranks > 1) {
    for_each(thread, S::kConsumers,
             [&](int, int, float* at) { *reinterpret_cast<float4*>(at) = sum_of_shares(at); });
    sync_cluster();
  }
  const auto over_ranks = [&](const float* from) {
    float4 of_rank[kMostRanks], sum{};  // all are asked for before the first is there
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r)
      of_rank[r] = r < params.ranks ? load4_of_rank(from, r) : float4{};
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) add4(sum, of_rank[r]);
    return sum;
  };
  const bool has_bias = params.output.bias.data != nullptr;
  const auto bias = [&](int n) {
    return own.s < 0 ? NAN : has_bias ? bias_of(params.output, true, own.s, n) : 0.f;
  };
  for_each(own.rank * S::kConsumers + thread, params.ranks * S::kConsumers,
           [&](int m, int row, const float* from) {
             const int n = tile * results + row;
             if (n >= params.width) return;
             float factor = S::kWorth;
             if (params.x.norm.data != nullptr) {
               float squares = 0;
               for (int r = 0; r < params.ranks; ++r)
                 squares += params.ranks > 1 ? load_of_rank(factors + m, r) : factors[m];
               factor *= norm_factor(squares, params.x.K, params.eps);
             }
             const float4 sum = params.ranks > 1 ? over_ranks(from) : sum_of_shares(from);
             store4(params.output.y, params.output.dtype, (own.first_row + m) * params.width + n,
                    {fmaf(sum.x, factor, bias(n)), fmaf(sum.y, factor, bias(n + 1)),
                     fmaf(sum.z, factor, bias(n + 2)), fmaf(sum.w, factor, bias(n + 3))});
           });
  if (params.ranks > 1) leave_cluster();
}

}  // namespace jaxgemv::cuda::wgmma_tma
