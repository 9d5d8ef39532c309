// The kernel for small matrices: straight-line code, without a ring of copies or an image of x. Each lane
// requests all that it needs, weights, scales and x, in the layout of mma.m16n8k16, so that nothing
// goes through shared memory but the sums of warps, before the only barrier (and tables, which have
// another).
// A warp has 16 rows of the weights and 8 * kTilesM rows of x; `deep` warps of a CTA, and the CTAs of
// a cluster, share K. Lane (g, t) has octets of rows g and g + 8 of the weights and the same octets of row g
// of x (weights.cuh), and pairs their elements in the same order, so that k is permuted alike in both.
// The affine part is two fp32 terms a group,
//   y += f * dot(q, x) + c * sum(x),
// where sum(x) comes from tensor cores too: a product with ones, whose results lie in the same lanes as dot's.
// Formats other than integers have the first term alone.
//
// With a gated activation a tile has eight rows of the first half and their partners in the second. The sum of
// squares for a norm is handled like a row of results. What the epilogue needs, bias and residual,
// is requested first of all.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/grid.cuh"
#include "pairs.cuh"
#include "weights.cuh"
#include "x.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kMaxWarps = 16, kMostRanks = 8;

struct Params {
  WeightSource weights;
  Param codebook;
  const void* x;
  const int32_t* index;
  int stack, M, N, K;
  int log_across, log_deep, log_ranks;  // log2 of warps with own rows; of warps, CTAs that share K
  int group_blocks, units;              // blocks of a unit in one group; units of a CTA
  int log_step, apart;                  // rows of y in a tile, and from its row 0 to row 8
  Output output;
  Param norm;
  float eps;
};

__device__ __forceinline__ void clear(float& value) { value = 0; }
template <typename T, int kCount>
__device__ __forceinline__ void clear(T (&values)[kCount]) {
#pragma unroll
  for (T& value : values) clear(value);
}

template <Format kFormat, int kBits, typename L, int kTilesM, typename X, Norm kNorm>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    gemv_direct(const __grid_constant__ Params params) {
  using Codes = Pairs<kFormat, kBits, ElementOf<X, kNorm>>;
  using Operand = direct::Operand<X, kNorm, Codes::kHasShift>;
  constexpr int kM = kTilesM * kTileM, kParts = Operand::kParts;
  constexpr bool kNormed = kNorm != Norm::kNone;
  constexpr int kSquares = kTileN;  // the row of x's squares, behind a warp's rows
  __shared__ float partial[kMaxWarps][kTileN + kNormed][kM + 1];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = uniform(threadIdx.x / 32);
  const int deep = 1 << params.log_deep;
  const int m0 = blockIdx.z * kM, rows = min(params.M - m0, kM);
  const Index first_row = Index{blockIdx.y} * params.M + m0;
  const int ranks = 1 << params.log_ranks, rank = blockIdx.x & (ranks - 1);
  const int tile = blockIdx.x >> params.log_ranks;
  wait_for_earlier();
  const int s = stack_entry(params.index, params.stack, blockIdx.y);

  // Neighbouring threads finish neighbouring rows of y; where CTAs share K, each finishes its share of them.
  const int log_rows = params.log_across + params.log_step, results = rows << log_rows;
  const bool is_gated = params.log_step < 4;
  const int width = is_gated ? params.apart : params.N;
  const int first_i = (ranks > 1 ? rank * blockDim.x : 0) + threadIdx.x;
  struct Result {
    int m, n;        // of y
    float* at;       // the first warp's sum
    float* squares;  // and those of its row of x
  };
  const auto result_of = [&](int i) {
    const int m = i >> log_rows, row = i & ((1 << log_rows) - 1);
    const int step = 1 << params.log_step;
    auto& sums = partial[(row >> params.log_step) << params.log_deep];
    return Result{m, (tile << log_rows) + row, &sums[row & (step - 1)][m],
                  &sums[kNormed ? kSquares : 0][m]};
  };
  struct Beside {
    float bias[2], scale[2], residual;
  };
  const auto beside = [&](const Result& result) {
    if (result.n >= width) return Beside{};
    const Output& output = params.output;
    Beside by{{}, {1, 1}, residual_of(output, (first_row + result.m) * width + result.n)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !is_gated) break;
      const int n = result.n + half * params.apart;
      by.bias[half] = bias_of(output, s >= 0, s, n);
      if constexpr (!Codes::kHasShift) by.scale[half] = global_scale_of(output, s >= 0, s, n);
    }
    return by;
  };
  Beside early{};
  if (first_i < results) early = beside(result_of(first_i));

  float y[kTilesM][4] = {}, squares[kTilesM][4] = {};
  if (s >= 0) {
    const int row =
        (((tile << params.log_across) + (warp >> params.log_deep)) << params.log_step) + g;
    const int n[2] = {min(row, params.N - 1), min(row + params.apart, params.N - 1)};
    const X* const x = kept(static_cast<const X*>(params.x) + (first_row + g) * params.K);
    const NormValues norm(params.norm, s, 0);
    Codes codes;
    Rows<kFormat, kBits, L> weights(params.weights, s, n);
    const int begin = rank * params.units + (warp & (deep - 1)), last = (rank + 1) * params.units;
#pragma unroll 1
    for (int u = begin; u < last; u += deep) {  // once at least
      const int first = L::first_octet(u);
      const Ends<L> ends(params.group_blocks, (params.weights.octets + 3) / 4 - u * L::kOctets);
      XOctet<X> octets[L::kOctets][kTilesM];
      RawOctet norms[kNormed ? L::kOctets : 1];
#pragma unroll
      for (int i = 0; i < L::kOctets; ++i) {
        const int octet = first + L::kStep * i;
        const bool inside = octet < params.weights.octets;
#pragma unroll
        for (int c = 0; c < kTilesM; ++c)
          octets[i][c].ask(x + c * kTileM * Index{params.K} + octet * 8,
                           inside && c * kTileM + g < rows);
        if constexpr (kNormed) norms[i].ask(norm.data, norm.dtype, octet * 8, inside);
      }
      weights.ask(first, ends);

      if constexpr (Codes::kHasTable)
        if (u == begin)  // while the weights are on their way
          codes.make(params.codebook, s, kDtypeOf<X> != Dtype::kF32);

      // Each part of x has sums of its own, because an mma waits for the one before it.
      float dot[L::kGroups][kTilesM][kParts][4] = {}, sum[kTilesM][4] = {};
      const auto end_group = [&](int i, bool inside) {
#pragma unroll
        for (int c = 0; c < kTilesM; ++c) Operand::end_sum(sum[c]);
#pragma unroll
        for (int half = 0; half < L::kGroups; ++half)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float2 terms = weights.terms(i, half, r);
            if constexpr (L::kEndsOnce)
              terms = {kept_if(inside, terms.x), kept_if(inside, terms.y)};
#pragma unroll
            for (int c = 0; c < kTilesM; ++c)
#pragma unroll
              for (int e = 2 * r; e < 2 * r + 2; ++e) {
                float all = dot[half][c][kParts - 1][e];
#pragma unroll
                for (int part = kParts - 2; part >= 0; --part) all += dot[half][c][part][e];
                y[c][e] = fmaf(all * codes.unit(), terms.x, y[c][e]);
                if constexpr (Codes::kHasShift) y[c][e] = fmaf(sum[c][e], terms.y, y[c][e]);
              }
          }
      };
#pragma unroll
      for (int i = 0; i < L::kOctets; ++i) {
        Operand own[kTilesM];
#pragma unroll
        for (int c = 0; c < kTilesM; ++c)
          own[c].make(octets[i][c], norms[kNormed ? i : 0], norm.dtype, sum[c], squares[c]);
        uint32_t low[2], high[2];
        weights.bits(i, 0, low[0], high[0]), weights.bits(i, 1, low[1], high[1]);
#pragma unroll
        for (int part = 0; part < Codes::kParts; ++part) {
          if (!codes.has(part)) break;
          uint32_t a[2][4];
          codes.of(low[0], high[0], part, a[0]), codes.of(low[1], high[1], part, a[1]);
          // Products of smaller parts, whose numbers add up to more than 2, are left out: below 2^-23 of the whole.
#pragma unroll
          for (int c = 0; c < kTilesM; ++c)
#pragma unroll
            for (int of_x = 0; of_x < min(kParts, 3 - part); ++of_x)
#pragma unroll
              for (int half = 0; half < L::kGroups; ++half)
                own[c].multiply(of_x, a, !L::kHalves || t / 2 == half, dot[half][c][of_x]);
        }
        if (L::kEndsOnce ? i < L::kOctets - 1 : !ends.has(i)) continue;
        end_group(i, ends.has(i));
        clear(sum), clear(dot);
      }
    }
  }

  if (next_may_begin(params.output, params.M)) let_next_begin();
#pragma unroll
  for (int c = 0; c < kTilesM; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[warp][g + e / 2 * 8][c * kTileM + t * 2 + e % 2] = y[c][e];
    if constexpr (kNormed) {
      const float of_row = Operand::end_squares(squares[c]);
      if (t == g / 2) partial[warp][kSquares][c * kTileM + g] = of_row;
    }
  }
  __syncthreads();
  // The sums of warps are added in a fixed order. Where CTAs share K, a CTA writes its total over the first warp's
  // sum, and then the totals of all CTAs are added.
  constexpr int kWarp = sizeof(partial[0]) / sizeof(float);
  const auto of_warps = [&](const float* at) {
    float total = 0;
#pragma unroll 4
    for (int d = 0; d < deep; ++d) total += at[d * kWarp];
    return total;
  };
  if (ranks > 1) {
    const int across = 1 << params.log_across;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * across * kTileN; i += blockDim.x) {
      const int row = i & (across * kTileN - 1), m = i / kTileN >> params.log_across;
      float& to = partial[row / kTileN << params.log_deep][row % kTileN][m];
      to = of_warps(&to);
    }
    if constexpr (kNormed)
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * across; i += blockDim.x) {
        float& to =
            partial[(i & (across - 1)) << params.log_deep][kSquares][i >> params.log_across];
        to = of_warps(&to);
      }
    sync_cluster();
  }
  const auto of_all = [&](const float* at) {
    if (ranks == 1) return of_warps(at);
    float of_rank[kMostRanks], total = 0;  // all are asked for before the first is there
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) of_rank[r] = r < ranks ? load_of_rank(at, r) : 0.f;
#pragma unroll
    for (int r = 0; r < kMostRanks; ++r) total += of_rank[r];
    return total;
  };
#pragma unroll 1
  for (int i = first_i; i < results; i += ranks * blockDim.x) {
    const Result result = result_of(i);
    if (result.n >= width) continue;
    const Beside by = i == first_i ? early : beside(result);
    const float factor = kNormed ? norm_factor(of_all(result.squares), params.K, params.eps) : 1.f;
    const float up = is_gated ? of_all(result.at + kTileN / 2 * (kM + 1)) : 0.f;
    finish<Parts::kNormAndEpilogue>(params.output, (first_row + result.m) * width + result.n,
                                    fmaf(of_all(result.at), factor * by.scale[0], by.bias[0]),
                                    fmaf(up, factor * by.scale[1], by.bias[1]), by.residual);
  }
  if (ranks > 1) leave_cluster();
}

}  // namespace jaxgemv::cuda::direct
