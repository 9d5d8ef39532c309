// The kernel for small matrices: a straight line, without a ring of copies or an image of x. A lane
// asks for all that it needs, weights, scales and x, in the layout of mma.m16n8k16, so that nothing
// goes through shared memory but the sums of warps, behind the one barrier.
//
// A warp has 16 rows of the weights and 8 * kTilesM rows of x; `deep` warps of a CTA, and the CTAs of
// a cluster, share K. Lane (g, t) has octets of rows g and g + 8 of the weights and of row g of x, the
// same ones (weights.cuh), and pairs of their elements in the same order, so that k is permuted alike.
// The affine part is two fp32 terms a group,
//   y += f * dot(q, x) + c * sum(x),
// where sum(x) comes from tensor cores too: a product with ones, which lies where dot lies. Formats
// other than integers have the first alone.
#pragma once

#include "../common/epilogue.cuh"
#include "pairs.cuh"
#include "weights.cuh"
#include "x.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kMaxWarps = 16;

struct Params {
  WeightSource weights;
  Param codebook;
  const void* x;
  const int32_t* index;
  int stack, M, N, K;
  int log_across, log_deep, log_ranks;  // warps with rows of their own; warps and CTAs that share K
  int octets, units;                    // of a lane in a unit, and of a CTA
  Output output;
};

// Of an octet of weights, one of its parts, with one of x; `sum` only where weights have shifts.
template <typename Codes, typename Element, int kParts>
__device__ __forceinline__ void add_products(float (&dot)[4], float (&sum)[4],
                                             const uint32_t (&a)[2][4], int part,
                                             const uint32_t (&b)[kParts][2][2]) {
  constexpr uint32_t kOnes = std::is_same_v<Element, __half> ? 0x3c003c00u : 0x3f803f80u;
  // Products of smaller parts of x are below 2^-23 of the whole.
#pragma unroll
  for (int of_x = min(kParts, 3 - part) - 1; of_x >= 0; --of_x)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mma_m16n8k16<Element>(dot, a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1],
                            b[of_x][h]);
      if constexpr (Codes::kHasShift)
        mma_m16n8k16<Element>(sum, kOnes, kOnes, kOnes, kOnes, b[of_x][h]);
    }
}

template <Format kFormat, int kBits, Sharing kSharing, int kTilesM, typename X>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    gemv_direct(const __grid_constant__ Params params) {
  using Element = typename XOctet<X>::Element;
  using Codes = Pairs<kFormat, kBits, Element>;
  using L = Lanes<kBits, kSharing>;
  constexpr int kM = kTilesM * kTileM;
  __shared__ float partial[kMaxWarps][kTileN][kM + 1];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be uniform
  const int deep = 1 << params.log_deep, count = L::kWhole ? 4 : params.octets;
  const int m0 = blockIdx.z * kM, rows = min(params.M - m0, kM);
  const Index first_row = Index{blockIdx.y} * params.M + m0;
  const int ranks = 1 << params.log_ranks, rank = blockIdx.x & (ranks - 1);
  const int tile = blockIdx.x >> params.log_ranks;
  const int s = stack_entry(params.index, params.stack, blockIdx.y);

  float y[kTilesM][4] = {};
  if (s >= 0) {
    const int row = ((tile << params.log_across) + (warp >> params.log_deep)) * kTileN + g;
    const int n[2] = {min(row, params.N - 1), min(row + 8, params.N - 1)};
    const X* const x = static_cast<const X*>(params.x) + (first_row + g) * params.K;
    Codes codes;
    Rows<kFormat, kBits, kSharing> weights(params.weights, s, n);
    const int begin = rank * params.units + (warp & (deep - 1)), last = (rank + 1) * params.units;
#pragma unroll 1
    for (int u = begin; u < last; u += deep) {  // once at least
      const int first = L::first_octet(u, count);
      XOctet<X> octets[L::kOctets][kTilesM];
#pragma unroll
      for (int i = 0; i < L::kOctets; ++i)
#pragma unroll
        for (int c = 0; c < kTilesM; ++c) {
          const int octet = first + L::kStep * i;
          if (i < count && octet < params.weights.octets && c * kTileM + g < rows)
            octets[i][c].ask(x + c * kTileM * Index{params.K} + octet * 8);
        }
      weights.ask(first, count);

      if constexpr (Codes::kHasTable)
        if (u == begin) codes.make(params.codebook, s);  // while the weights are on their way

      float dot[L::kGroups][kTilesM][4] = {}, sum[kTilesM][4] = {};
#pragma unroll
      for (int i = 0; i < L::kOctets; ++i) {
        if (i >= count) break;
        uint32_t low[2], high[2];
        weights.bits(i, 0, low[0], high[0]), weights.bits(i, 1, low[1], high[1]);
#pragma unroll
        for (int part = 0; part < Codes::kParts; ++part) {
          if (!codes.has(part)) break;
          uint32_t a[2][4];
          codes.of(low[0], high[0], part, a[0]), codes.of(low[1], high[1], part, a[1]);
#pragma unroll
          for (int c = 0; c < kTilesM; ++c)
#pragma unroll
            for (int group = 0; group < L::kGroups; ++group) {
              XOctet<X> own = octets[i][c];
              if (L::kHalves && t / 2 != group) own = {};
              uint32_t b[XOctet<X>::kParts][2][2];
              own.pairs(b);
              add_products<Codes, Element>(dot[group][c], sum[c], a, part, b);
            }
        }
      }
#pragma unroll
      for (int group = 0; group < L::kGroups; ++group)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 terms = weights.terms(group, r, Codes::kCentre);
#pragma unroll
          for (int c = 0; c < kTilesM; ++c)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e)
              y[c][e] += fmaf(dot[group][c][e] * codes.unit(), terms.x, sum[c][e] * terms.y);
        }
    }
  }

#pragma unroll
  for (int c = 0; c < kTilesM; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[warp][g + e / 2 * 8][c * kTileM + t * 2 + e % 2] = y[c][e];
  __syncthreads();
  // The sums of warps are added in a fixed order, then, where the first of each was, those of CTAs.
  // Neighbouring threads have neighbouring rows of the weights.
  const int log_rows = params.log_across + 4, results = rows << log_rows;
  const auto place_of = [&](int i, int& m, int& row) {
    m = i >> log_rows, row = i & ((1 << log_rows) - 1);
    return &partial[(row / kTileN) << params.log_deep][row % kTileN][m];
  };
  const auto finish_one = [&](int m, int row, float total) {
    const int n = (tile << log_rows) + row;
    if (n < params.N)
      finish<Parts::kNone>(params.output, (first_row + m) * params.N + n,
                           total + bias_of(params.output, s >= 0, s, n));
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < results; i += blockDim.x) {
    int m, row;
    float* const at = place_of(i, m, row);
    float total = 0;
#pragma unroll 8
    for (int d = 0; d < deep; ++d) total += at[d * kTileN * (kM + 1)];
    if (ranks == 1)
      finish_one(m, row, total);
    else
      *at = total;
  }
  if (ranks == 1) return;
  sync_cluster();
#pragma unroll 1
  for (int i = rank * blockDim.x + threadIdx.x; i < results; i += ranks * blockDim.x) {
    int m, row;
    const float* const at = place_of(i, m, row);
    float total = 0;
#pragma unroll 2
    for (int r = 0; r < ranks; ++r) total += load_of_rank(at, r);
    finish_one(m, row, total);
  }
  sync_cluster();  // the others have read this CTA's sums
}

}  // namespace jaxgemv::cuda::direct
