// From the sums of a CTA's warps to y, four results at a time.
#pragma once

#include "results.cuh"

namespace jaxgemv::cuda::mma_any {

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void add4(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// What put_results does, where there is nothing behind the sums but a global scale and a bias, and rows of y are
// whole fours of results: a thread takes four rows of the weights and one of x. (Part of put_results, this made
// wgmma_any's kernels of tables keep registers in memory.)
template <typename S>
__device__ __forceinline__ void put_fours(const Params& params, const Share& own, int tile,
                                          float* partial, const float* factors, int threads) {
  const Placing<S> sums(params);
  // A divisor of the threads: all fours of a thread are of the same rows of the weights.
  const int fours = params.across * S::kRows / 4, step_m = threads / fours;
  const int thread = threadIdx.x, of_thread = thread / fours,
            row = (thread - of_thread * fours) * 4;
  // use(m, its first sum), of a share of all fours.
  const auto for_each = [&](int share, int shares, auto&& use) {
    const int first = share * step_m + of_thread, step = shares * step_m,
              pitch = params.parts * sums.pitch;
    float* at = partial + first * pitch + row;
#pragma unroll 1
    for (int m = first; m < own.M; m += step, at += step * pitch) use(m, at);
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
  if (params.ranks > 1) {
    if (params.deep * params.parts > 1)
      for_each(0, 1, [&](int, float* at) { *reinterpret_cast<float4*>(at) = sum_of_shares(at); });
    sync_cluster();
  }
  const auto over_ranks = [&](const float* from) {
    constexpr int kAtOnce = 4;
    float4 sum{};
#pragma unroll 1
    for (int first = 0; first < params.ranks; first += kAtOnce) {
      float4 of_rank[kAtOnce];  // all are asked for before the first is there
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        of_rank[r] = first + r < params.ranks ? load4_of_rank(from, first + r) : float4{};
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) add4(sum, of_rank[r]);
    }
    return sum;
  };
  const int n = tile * params.across * S::kRows + row;
  const bool inside = n < params.width;
  float bias[4], worth[4] = {S::kWorth, S::kWorth, S::kWorth, S::kWorth};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bias[i] = inside ? bias_of(params.output, own.s >= 0, own.s, n + i) : 0.f;
  if constexpr (S::kHasGlobalScale)
    if (params.output.global_scale.data != nullptr)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        worth[i] *= global_scale_of(params.output, inside && own.s >= 0, own.s, n + i);
  for_each(own.rank, params.ranks, [&](int m, const float* from) {
    if (!inside) return;
    float factor = 1;
    if (params.x.norm.data != nullptr) {
      float squares = 0;
      for (int r = 0; r < params.ranks; ++r)
        squares += params.ranks > 1 ? load_of_rank(factors + m, r) : factors[m];
      factor *= norm_factor(squares, params.x.K, params.eps);
    }
    const float4 sum = params.ranks > 1 ? over_ranks(from) : sum_of_shares(from);
    store4(params.output.y, params.output.dtype, (own.first_row + m) * params.width + n,
           {fmaf(sum.x, factor * worth[0], bias[0]), fmaf(sum.y, factor * worth[1], bias[1]),
            fmaf(sum.z, factor * worth[2], bias[2]), fmaf(sum.w, factor * worth[3], bias[3])});
  });
  if (params.ranks > 1) leave_cluster();
}

}  // namespace jaxgemv::cuda::mma_any
