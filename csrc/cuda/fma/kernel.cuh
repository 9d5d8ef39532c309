// The kernel for one and two rows of x, in float32 FMAs: every width, any K, groups in multiples of 32. A lane takes
// blocks of 32 codes of kRowsN rows of the weights; lanes of a warp, or of several warps, share these rows.
//
// A code takes one logic instruction, one subtraction, and an FMA for each row of x. What is done to x is done
// once for the kRowsN rows of the weights.
#pragma once

#include "../common/codes.cuh"
#include "../common/epilogue.cuh"
#include "../common/grid.cuh"
#include "../common/weight_source.cuh"
#include "block.cuh"
#include "x.cuh"

namespace jaxgemv::cuda::fma {

constexpr int kMostWarps = 8;

struct Params {
  WeightSource weights;
  const void* x;
  const int32_t* index;
  int stack, M, N, K;
  int log_lanes, log_split;  // lanes of a warp, and warps, that share rows
  uint32_t exponent;         // CodesInWords::kExponent
  Output output;
};

// This lane's blocks of kRowsN rows that follow one another: the block numbered `block`, and then every `step`-th.
// kWhole: K is whole blocks, and all is aligned.
template <int kBits, int kRowsN, bool kWhole>
struct Rows {
  const uint32_t* packed;
  const char *scales, *shifts;
  Index apart;  // 1, or 0 for copies of one row
  int block, step;

  struct Raw {
    Block<kBits> blocks[kRowsN];
    uint32_t scales[kRowsN], shifts[kRowsN];
    int group;
  };

  __device__ __forceinline__ Rows(const WeightSource& from, int s, int n, Index apart, int first,
                                  int step)
      : packed(from.row(s, n) + Index{first} * kBits),
        scales(from.scale.row(s, n)),
        shifts(from.shift.row(s, n)),
        apart(apart),
        block(first),
        step(step) {}

  __device__ __forceinline__ void ask(const WeightSource& from, Raw& raw) {
    raw.group = from.group_of(block * (kBlock / kOctet));
#pragma unroll
    for (int r = 0; r < kRowsN; ++r) {
      const uint32_t* row = packed + r * apart * from.row_words;
      if (kWhole)
        raw.blocks[r].load(row);
      else
        raw.blocks[r].load(row, from.row_words - block * kBits);
    }
#pragma unroll
    for (int r = 0; r < kRowsN; ++r) {
      raw.scales[r] = from.scale.ask(scales + r * apart * from.scale.n_bytes, raw.group);
      raw.shifts[r] = from.shift.ask(shifts + r * apart * from.shift.n_bytes, raw.group);
    }
    block += step, packed += Index{step} * kBits;
  }

  // The terms of row r: y += terms.x * dot(q, x) + terms.y * sum(x).
  __device__ __forceinline__ float2 terms(const WeightSource& from, const Raw& raw, int r) const {
    const char *scale = scales + r * apart * from.scale.n_bytes,
               *shift = shifts + r * apart * from.shift.n_bytes;
    return terms_of(from.affine, from.scale.value(raw.scales[r], scale, raw.group),
                    from.shift.value(raw.shifts[r], shift, raw.group), mid_code(kBits));
  }
};

// sums += this lane's part of the products.
template <int kBits, int kRowsN, int kRowsM, bool kWhole, typename X>
__device__ __forceinline__ void multiply(const Params& p, int s, int n, const X* const (&x)[kRowsM],
                                         int first, int step, float (&sums)[kRowsN][kRowsM]) {
  using R = Rows<kBits, kRowsN, kWhole>;
  using C = CodesInWords<kBits>;
  const int blocks = static_cast<int>(ceil_div(p.K, kBlock));
  R rows(p.weights, s, n, kWhole || p.N >= kRowsN, first, step);
  typename R::Raw next;
  if (first < blocks) rows.ask(p.weights, next);
#pragma unroll(kWhole ? 2 : 1)
  for (int block = first; block < blocks; block += step) {
    const typename R::Raw raw = next;
    if (block + step < blocks) rows.ask(p.weights, next);
    float dots[kRowsN][kRowsM] = {}, sum_x[kRowsM] = {};
    const auto ask_x = [&](int octet, XOctet<X, kRowsM>& to) {
      const int k = block * kBlock + octet * kOctet;
      if (kWhole)
        to.load(x, k);
      else
        to.load(x, k, p.K - k);
    };
    XOctet<X, kRowsM> ahead;
    ask_x(0, ahead);
#pragma unroll
    for (int o = 0; o < kBlock / kOctet; ++o) {
      const XOctet<X, kRowsM> octet = ahead;
      if (o + 1 < kBlock / kOctet) ask_x(o + 1, ahead);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        const int i = o * kOctet + j;
        float v[kRowsM];
#pragma unroll
        for (int m = 0; m < kRowsM; ++m) {
          v[m] = octet.value(m, j);
          sum_x[m] += v[m];
          v[m] *= 1.f / static_cast<float>(1 << C::place(i));
        }
#pragma unroll
        for (int r = 0; r < kRowsN; ++r) {
          const float q = C::scaled(raw.blocks[r].words, i, p.exponent);
#pragma unroll
          for (int m = 0; m < kRowsM; ++m) dots[r][m] = fmaf(q, v[m], dots[r][m]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsN; ++r) {
      const float2 terms = rows.terms(p.weights, raw, r);
#pragma unroll
      for (int m = 0; m < kRowsM; ++m)
        sums[r][m] = fmaf(terms.x, dots[r][m], fmaf(terms.y, sum_x[m], sums[r][m]));
    }
  }
}

template <int kBits, int kRowsN, int kRowsM, bool kWhole, typename X>
__global__ void __launch_bounds__(kMostWarps * 32, 2) gemv_fma(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lanes = 1 << p.log_lanes, split = 1 << p.log_split;
  const int sets = blockDim.x >> (p.log_lanes + p.log_split);  // of rows, in a CTA
  const int set = (warp >> p.log_split) * (32 >> p.log_lanes) + (lane >> p.log_lanes);
  // The last set of rows begins earlier, rather than reach beyond the last row.
  const int own_n = (blockIdx.x * sets + set) * kRowsN, n = max(min(own_n, p.N - kRowsN), 0);
  const int m0 = blockIdx.z * kRowsM;
  const Index b = blockIdx.y;
  wait_for_earlier();
  const int s = stack_entry(p.index, p.stack, b);

  float sums[kRowsN][kRowsM] = {};
  if (s >= 0) {
    const int first = (warp & (split - 1)) * lanes + (lane & (lanes - 1));
    const X* x[kRowsM];
#pragma unroll
    for (int m = 0; m < kRowsM; ++m)
      x[m] = static_cast<const X*>(p.x) + (b * p.M + min(m0 + m, p.M - 1)) * p.K;
    multiply<kBits, kRowsN, kRowsM, kWhole>(p, s, n, x, first, split * lanes, sums);
  }

#pragma unroll
  for (int r = 0; r < kRowsN; ++r)
#pragma unroll
    for (int m = 0; m < kRowsM; ++m)
      for (int apart = lanes / 2; apart > 0; apart /= 2)
        sums[r][m] += __shfl_xor_sync(~0u, sums[r][m], apart);
  constexpr int kSums = kRowsN * kRowsM;
  const bool leads = (lane & (lanes - 1)) == 0;
  if (split > 1) {
    __shared__ float shared[kMostWarps][32 * kSums];
    float* own = &shared[warp][(lane >> p.log_lanes) * kSums];
    if (leads)
#pragma unroll
      for (int i = 0; i < kSums; ++i) own[i] = sums[i / kRowsM][i % kRowsM];
    __syncthreads();
    if ((warp & (split - 1)) != 0) return;
#pragma unroll 1
    for (int other = 1; other < split; ++other)
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i / kRowsM][i % kRowsM] += own[other * 32 * kSums + i];
  }
  if (!leads) return;
#pragma unroll
  for (int r = 0; r < kRowsN; ++r)
#pragma unroll
    for (int m = 0; m < kRowsM; ++m)
      if (n + r >= own_n && n + r < p.N && m0 + m < p.M)
        finish<Parts::kNone>(p.output, (b * p.M + m0 + m) * p.N + n + r,
                             sums[r][m] + bias_of(p.output, s >= 0, s, n + r));
}

}  // namespace jaxgemv::cuda::fma
