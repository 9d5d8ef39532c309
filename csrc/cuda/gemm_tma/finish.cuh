// The epilogue of the gemm_tma kernel: from sums to y.
#pragma once

#include "../image/fours.cuh"
#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Eight columns, an octet, of a warp's 16 rows are four sums of a lane: y[4 p + 2 r + e] is of column 8 p + 2 t + e and
// row g + 8 r of operand A, so of row n + r, where n is even.
template <typename S, typename X>
class Results {
 public:
  __device__ __forceinline__ Results(const Params& params, const Work<S>& own, const Tile& tile)
      : params_(params),
        rows_(own.rows_of(params, tile)),
        n_(tile.number * kTileRows + static_cast<int>(threadIdx.x) / 32 * kTileN +
           row_of_operand(threadIdx.x % 32 / 4)),
        column_(threadIdx.x % 4 * 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool inside = n_ + r < params.width;
      bias_[r] = inside ? bias_of(params.output, own.s >= 0, own.s, n_ + r) : 0.f;
      worth_[r] =
          S::C::kHasShift ? 1 : global_scale_of(params.output, inside && own.s >= 0, own.s, n_ + r);
    }
    columns_ = (n_ < params.width ? rows_.M : 0) - column_;
    to_ = static_cast<X*>(params.output.y) + (rows_.first_row + column_) * params.width + n_;
  }

  // Where the results of octet p go, and how far it is to those of the next one.
  __device__ __forceinline__ X* at(int p) const { return to_ + p * step(); }
  __device__ __forceinline__ Index step() const { return 8 * Index{params_.width}; }

  // Writes octet p where y has dtype X and an even number of elements per row: a warp writes whole sectors of 32 bytes.
  __device__ __forceinline__ void put_pairs(int p, X* to, const float4& v) const {
    if (8 * p < columns_) put_pair(to, v.x, v.z);
    if (8 * p + 1 < columns_) put_pair(to + params_.width, v.y, v.w);
  }
  __device__ __forceinline__ void put_singly(int p, const float4& v) const {
    const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = n_ + i / 2, m = 8 * p + i % 2;
      if (m < columns_ && n < params_.width)
        store(params_.output.y, params_.output.dtype,
              (rows_.first_row + column_ + m) * params_.width + n, result(sums[i], i / 2));
    }
  }

 private:
  const Params& params_;
  const RowsOfX rows_;
  const int n_, column_;
  float bias_[2], worth_[2];
  int columns_;  // columns left from this lane's first one
  X* to_;

  __device__ __forceinline__ float result(float sum, int r) const {
    return fmaf(sum, worth_[r], bias_[r]);
  }
  __device__ __forceinline__ void put_pair(X* to, float first, float second) const {
    if constexpr (sizeof(X) == 2)
      *reinterpret_cast<uint32_t*>(to) = rounded_pair<X>(result(first, 0), result(second, 1));
    else
      *reinterpret_cast<float2*>(to) = {result(first, 0), result(second, 1)};
  }
};

// packs: y has dtype X, and an even number of elements per row.
template <typename S, typename X, int kCount>
__device__ __forceinline__ void put_octets(const Params& params, const Work<S>& own,
                                           const Tile& tile, const float (&y)[kCount],
                                           uint8_t* base, bool packs) {
  constexpr int kThreads = 32 * S::kConsumers, kOctets = kCount / 4;
  const Results<S, X> results(params, own, tile);
  const int octets = (own.rows_of(params, tile).M + 7) / 8;
  if (packs && params.ranks == 1) {
    X* to = results.at(0);
#pragma unroll
    for (int p = 0; p < kOctets; ++p, to += results.step())
      results.put_pairs(p, to, {y[4 * p], y[4 * p + 1], y[4 * p + 2], y[4 * p + 3]});
    return;
  }
  // The sums take the place of the stages, which all have to have read; a CTA of the cluster adds up a share of the
  // octets.
  own.ctas > 1 ? sync_cluster() : sync_threads(kThreads);
  const int share =  // anew: no register for it through the loop
      kept(static_cast<int>(blockIdx.x)) / own.ctas % params.ranks;
  const int first = octets * share / params.ranks, last = octets * (share + 1) / params.ranks;
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
      float4 some[2][kAtOnce];  // all loads are issued before one is used
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
      if (p + i < last)
        packs ? results.put_pairs(p + i, results.at(p + i), sum[i])
              : results.put_singly(p + i, sum[i]);
  }
  if (params.ranks > 1) leave_cluster();
}

#endif

}  // namespace jaxgemv::cuda::gemm_tma
