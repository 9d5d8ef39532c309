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

// Four results of a row of x: what stands behind their sums, `up` being those of a gated activation's second half.
__device__ __forceinline__ void put_four(const Output& output, Index at, float4 sum, float4 up) {
  float residual[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) residual[i] = residual_of(output, at + i);
  // One after another, since the code of all activations is long.
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float y = finished(output, sum.x, up.x, residual[0]);
    sum = {sum.y, sum.z, sum.w, y}, up = {up.y, up.z, up.w, up.x};
    residual[0] = residual[1], residual[1] = residual[2], residual[2] = residual[3];
  }
  store4(output.y, output.dtype, at, sum);
}

// What put_results does, where rows of y are whole fours of results: a thread takes four rows of the weights and one of
// x. kParts: whether there may be an activation or a residual. (Part of put_results, this made wgmma_any's kernels of
// tables keep registers in memory.)
template <typename S, bool kParts>
__device__ __forceinline__ void put_fours(const Params& params, const Share& own, int tile,
                                          float* partial, const float* factors, int threads) {
  const Placing<S> sums(params);
  const bool gated = kParts && is_gated(params.output.activation);
  // A divisor of the threads: all fours of a thread are of the same rows of the weights.
  const int fours = params.across * S::kRows / 4 >> gated, step_m = threads / fours;
  const int thread = threadIdx.x, of_thread = thread / fours, four = thread - of_thread * fours;
  const int row = gated ? four / 2 * kTileN + four % 2 * 4 : four * 4;
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
      for_each(0, 1, [&](int, float* at) {
        *reinterpret_cast<float4*>(at) = sum_of_shares(at);
        if (gated) *reinterpret_cast<float4*>(at + kPair) = sum_of_shares(at + kPair);
      });
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
  const int n = (tile * fours + four) * 4;
  const bool inside = n < params.width;
  // Of the results, and of the second half of what they are gated by.
  struct Terms {
    float bias[4], worth[4];
  };
  const auto terms_of = [&](int first, bool exist) {
    Terms terms;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      terms.bias[i] = exist ? bias_of(params.output, own.s >= 0, own.s, first + i) : 0.f;
      terms.worth[i] = S::kWorth;
    }
    if constexpr (S::kHasGlobalScale) {
      if (params.output.global_scale.data != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          terms.worth[i] *= global_scale_of(params.output, exist && own.s >= 0, own.s, first + i);
      }
    }
    return terms;
  };
  const Terms terms = terms_of(n, inside), of_up = terms_of(n + params.width, inside && gated);
  for_each(own.rank, params.ranks, [&](int m, const float* from) {
    if (!inside) return;
    float factor = 1;
    if (params.x.norm.data != nullptr) {
      float squares = 0;
      for (int r = 0; r < params.ranks; ++r)
        squares += params.ranks > 1 ? load_of_rank(factors + m, r) : factors[m];
      factor *= norm_factor(squares, params.x.K, params.eps);
    }
    const auto total = [&](const float* from, const Terms& of) {
      const float4 sum = params.ranks > 1 ? over_ranks(from) : sum_of_shares(from);
      return float4{fmaf(sum.x, factor * of.worth[0], of.bias[0]),
                    fmaf(sum.y, factor * of.worth[1], of.bias[1]),
                    fmaf(sum.z, factor * of.worth[2], of.bias[2]),
                    fmaf(sum.w, factor * of.worth[3], of.bias[3])};
    };
    const Index at = (own.first_row + m) * params.width + n;
    if (!kParts || params.plain)
      store4(params.output.y, params.output.dtype, at, total(from, terms));
    else
      put_four(params.output, at, total(from, terms),
               gated ? total(from + kPair, of_up) : float4{1, 1, 1, 1});
  });
  if (params.ranks > 1) leave_cluster();
}

}  // namespace jaxgemv::cuda::mma_any
