// From the sums of the gemm_tma kernel to y. What is here is met once a CTA, out of a cold cache of instructions, so
// there should be little of it.
#pragma once

#include "../mma_any/fours.cuh"
#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Eight columns, an octet, of a warp's 16 rows are four sums of a lane: y[4 p + 2 r + e] is of row g + 8 r and column
// 8 p + 2 t + e. packs: y is of X, and has rows of whole 16 bytes.
template <typename S, typename X, int kCount>
__device__ __forceinline__ void put_octets(const Params& params, const Work<S>& own, int tile,
                                           const float (&y)[kCount], uint8_t* base, bool packs) {
  constexpr int kThreads = 32 * S::kConsumers, kOctets = kCount / 4;
  constexpr int kPitch = kTileRows * sizeof(X) + 16;  // of a row of y: 8 are in different banks
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int n0 = tile * kTileRows, octets = (own.M + 7) / 8;
  float bias[2], worth[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = n0 + warp * kTileN + lane / 4 + 8 * r;
    const bool inside = n < params.width;
    bias[r] = inside ? bias_of(params.output, own.s >= 0, own.s, n) : 0.f;
    worth[r] = S::C::kHasShift ? 1 : global_scale_of(params.output, inside && own.s >= 0, own.s, n);
  }
  const auto result = [&](float sum, int r) { return fmaf(sum, worth[r], bias[r]); };
  int first = 0, last = octets;  // of this CTA
  const bool complete = packs && params.ranks == 1;
  const uint32_t out = shared_address(base) + (complete ? 0 : kOctets * kThreads * 16);
  const uint32_t to = out + warp * (kTileN * static_cast<int>(sizeof(X))) +
                      (sizeof(X) == 2 ? lane % 8 * kPitch + lane / 8 % 2 * 16
                                      : lane % 4 * 2 * kPitch + lane / 4 * 4);
  const auto put = [&](int p, const float4& v) {
    const uint32_t at = to + (p - first) * (8 * kPitch);
    if constexpr (sizeof(X) == 2) {
      store_transposed(at, rounded_pair<X>(result(v.x, 0), result(v.y, 0)),
                       rounded_pair<X>(result(v.z, 1), result(v.w, 1)));
    } else {
      store_shared(at, result(v.x, 0)), store_shared(at + kPitch, result(v.y, 0));
      store_shared(at + 32, result(v.z, 1)), store_shared(at + kPitch + 32, result(v.w, 1));
    }
  };
  const auto put_singly = [&](int p, const float4& v) {
    const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = n0 + warp * kTileN + lane / 4 + i / 2 * 8, m = 8 * p + lane % 4 * 2 + i % 2;
      if (m < own.M && n < params.width)
        store(params.output.y, params.output.dtype, (own.first_row + m) * params.width + n,
              result(sums[i], i / 2));
    }
  };
  // All have read what the sums now take the place of.
  own.ctas > 1 ? sync_cluster() : sync_threads(kThreads);
  if (complete) {
#pragma unroll
    for (int p = 0; p < kOctets; ++p) put(p, {y[4 * p], y[4 * p + 1], y[4 * p + 2], y[4 * p + 3]});
  } else {
    // A CTA of the cluster adds up a share of the octets.
    first = octets * own.rank / params.ranks, last = octets * (own.rank + 1) / params.ranks;
    auto* const sums = reinterpret_cast<float4*>(base) + threadIdx.x;
#pragma unroll
    for (int p = 0; p < kOctets; ++p)
      sums[p * kThreads] = {y[4 * p], y[4 * p + 1], y[4 * p + 2], y[4 * p + 3]};
    params.ranks > 1 ? sync_cluster() : sync_threads(kThreads);
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int p = first; p < last; p += 2) {
      float4 sum[2] = {};
#pragma unroll 1
      for (int rank = 0; rank < params.ranks; rank += kAtOnce) {
        float4 some[2][kAtOnce];  // all are asked for before the first is there
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r)
            some[i][r] = rank + r < params.ranks && p + i < last
                             ? load4_of_rank(&sums[(p + i) * kThreads].x, own.of(rank + r))
                             : float4{};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) add4(sum[i], some[i][r]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (p + i < last) packs ? put(p + i, sum[i]) : put_singly(p + i, sum[i]);
    }
  }
  sync_threads(kThreads);
  constexpr int kChunk = 16 / sizeof(X), kChunks = kTileRows / kChunk;  // of a row, 16 bytes each
  const int chunk = threadIdx.x % kChunks, n = n0 + chunk * kChunk;
  auto* const y0 =
      static_cast<X*>(params.output.y) + (own.first_row + first * 8) * params.width + n;
  const int rows = packs && n < params.width ? min(last * 8, own.M) - first * 8 : 0;
#pragma unroll 4
  for (int m = threadIdx.x / kChunks; m < rows; m += kThreads / kChunks)
    *reinterpret_cast<uint4*>(y0 + m * Index{params.width}) =
        load_shared16(out + m * kPitch + chunk * 16);
  if (params.ranks > 1) leave_cluster();
}

#endif

}  // namespace jaxgemv::cuda::gemm_tma
