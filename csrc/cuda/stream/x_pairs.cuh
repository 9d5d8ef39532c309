// More than two rows of x as operand B of mma.m16n8k16, and the weights that meet them.
//
// Step p, 16 values of k, takes Codes<.., Element>::product(word, p, ..) of a row of the weights.
//
// x of type Element is only reordered. Other x becomes fp16 by a power of two for each span of a
// row, which brings the span's largest element to just under 2^15: elements of bfloat16 down to
// 2^-29 of it stay exact, smaller ones are off by 2^-40 of it at most. Sums of x are products with
// codes that are all one.
#pragma once

#include "../common/norm.cuh"
#include "../common/powers.cuh"
#include "../common/ptx.cuh"
#include "../common/scaled.cuh"

namespace jaxgemv::cuda::stream {

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

// The bits of the largest magnitude among pairs of x.
template <int kPairs>
__device__ __forceinline__ uint32_t largest_of(const uint32_t (&pairs)[kPairs]) {
  uint32_t largest = 0;
#pragma unroll
  for (const uint32_t pair : pairs) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
  return max(largest & 0xffffu, largest >> 16);
}

// The larger magnitude of two, or NaN.
__device__ __forceinline__ float largest_of(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
  return largest;
}

// Starts the copy of eight elements of x, of `size` bytes each, from element k of a row of K on; zeros past K.
// kAnyK: K may be no multiple of eight, and the row may begin anywhere.
template <bool kAnyK>
__device__ __forceinline__ void copy_octet(uint8_t* to, const char* from, int size, int k, int K) {
  if constexpr (!kAnyK) {
    copy_or_zeros(to, from, k < K);
    if (size == 4) [[unlikely]]
      copy_or_zeros(to + 16, from + 16, k < K);
  } else if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    copy_some(to, from, (K - k) * size);
    if (size == 4) copy_some(to + 16, from + 16, (K - k) * size - 16);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool inside = k + i < K;
      if (size == 4)
        copy_first<4>(to + 4 * i, from + 4 * i, inside ? 4 : 0);
      else
        reinterpret_cast<uint16_t*>(to)[i] =
            inside ? reinterpret_cast<const uint16_t*>(from)[i] : 0;
    }
  }
}

// x of any type, which a kernel parameter says.
struct AnyX {};

// Narrows a dtype to one of two, so that the compiler makes no code for a third.
__device__ __forceinline__ Dtype narrow(Dtype dtype) {
  return dtype == Dtype::kF16 ? Dtype::kF16 : Dtype::kBF16;
}

__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

// Up to kMaxRows rows of x and a warp's span of K, which is blocks of 4 * kUnits words. Where two
// groups share a block, rows have columns of two tiles, with zeros for the other group.
template <typename C, typename Element, typename X, int kMaxRows, int kSpanBytes, int kUnits,
          bool kHasHalves>
class XPairs {
  static constexpr int kSteps = C::kProducts;                // k16 steps of a word
  static constexpr int kShare = kUnits * C::kWordCodes / 8;  // 16-byte pieces of a block for a lane
  static constexpr int kColumnTiles = kMaxRows / 8 * (kHasHalves ? 2 : 1);  // of an mma's 8 columns
  static constexpr bool kScaled = !std::is_same_v<X, Element>;
  static_assert(kShare >= 1);

 public:
  using Units = uint32_t[2][kUnits];  // of rows g and g + 8 of the weights
  static constexpr bool kHasSums = C::kHasSums;
  static constexpr bool kHalves = false;       // halves of blocks in sums of their own, as in XInt8
  static constexpr bool kMayLackNorm = false;  // in a kernel that has one
  C codes;
  static constexpr int kBlocks = kSpanBytes / (16 * kUnits),
                       kSpanK = kSpanBytes / 4 * C::kWordCodes;
  static constexpr int kRows = kMaxRows, kRowsAColumn = 2;
  static constexpr int kRowBytes = 2 * kSpanK;  // of shared memory
  // Results of a lane: 4 c + 2 r + e is row g + 8 r of the weights, row 8 c + 2 t + e of x.
  static constexpr int kResults = 4 * kColumnTiles;

  static __device__ __forceinline__ bool is_in_parts(Dtype) { return false; }

  // Starts the copy of the span from k0 on, for rows whose first one begins at element `first` of x.
  template <bool kAnyK>
  static __device__ __forceinline__ void ask(const void* x, Dtype, Index first, int rows, int K,
                                             int k0, uint8_t* staged) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int j = 0; j < kSpanK / 256; ++j) {
        const int piece = lane_id() + 32 * j, k = k0 + 8 * piece;
        const void* const from = static_cast<const uint16_t*>(x) + (first + m * Index{K} + k);
        copy_octet<kAnyK>(staged + place(m, piece), static_cast<const char*>(from), 2, k, K);
      }
    }
  }

  // Turns the x that this warp has copied into operands.
  __device__ __forceinline__ float2 take(int rows, Dtype dtype, const uint8_t* staged,
                                         const StagedNorm&, int) {
    // Rows past the last one repeat it and are not stored.
    take_rows(staged, dtype,
              [&](int c, int g) { return min((kHasHalves ? 0 : 8 * c) + g, rows - 1); });
    return {};
  }

  // Adds a tile's products with block i to `sums`: to those of the plane, or to the two in turns.
  // codes_of(r, j, plane, step, half) gives the operand register made of word j of row g + 8 r.
  template <typename CodesOf>
  __device__ __forceinline__ void add_products(CodesOf&& codes_of, int i, int plane,
                                               float (&sums)[kColumnTiles][2][4]) const {
    constexpr bool kPlanes = C::kHasSums && C::kPlanes > 1;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c)
          mma_m16n8k16<Element>(sums[c][kPlanes ? plane : (j * kSteps + step) % 2],
                                codes_of(0, j, step, 0), codes_of(1, j, step, 0),
                                codes_of(0, j, step, 1), codes_of(1, j, step, 1), b[c][i][j][step]);
  }

  // v <- a tile's products with block i. kByBlock: including x's sum times a table's least entry, which has the same
  // scale.
  template <bool kByBlock>
  __device__ __forceinline__ void dot(const Units& w, int i, float (&v)[kResults]) const {
    // Accumulators: one for each plane, or two that take turns, because an mma waits for the one
    // before it.
    float sums[kColumnTiles][2][4] = {};
#pragma unroll
    for (int plane = 0; plane < C::kPlanes; ++plane) {
      if (!codes.has(plane)) break;
      add_products([&](int r, int j, int step,
                       int half) { return codes.product(w[r][j], plane, step, half); },
                   i, plane, sums);
    }
#pragma unroll
    for (int e = 0; e < kResults; ++e) {
      v[e] = fmaf(C::kOfSecond, sums[e / 4][1][e % 4], sums[e / 4][0][e % 4]);
      if (C::kHasSums && C::kPlanes > 1 && kByBlock) v[e] += sum_of(e, i);
    }
  }

  // For result e: which of the rows g and g + 8 of the weights, which half of a block's groups, and x's
  // sum over block i.
  static __device__ constexpr int row(int e) { return e / 2 % 2; }
  static __device__ constexpr int half(int e) { return e / 4; }
  __device__ __forceinline__ float sum_of(int e, int i) const { return sum[e / 4][i][e % 2]; }

  // Adds results to partial sums, at row g of the weights.
  __device__ __forceinline__ void add(float2* to, int column_size, int rows, bool more,
                                      const float (&v)[kResults], bool both_rows) const {
    const int t = lane_id() % 4;
    const auto result = [&](int c, int i) { return kHasHalves ? v[i] + v[4 + i] : v[4 * c + i]; };
#pragma unroll
    for (int c = 0; c < kMaxRows / 8; ++c)
      if (8 * c + 2 * t < rows)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (r > 0 && !both_rows) break;
          float2& at = to[(4 * c + t) * column_size + 8 * r];
          const float2 before = more ? at : float2{};
          at = {fmaf(power[c][0], result(c, 2 * r), before.x),
                fmaf(power[c][1], result(c, 2 * r + 1), before.y)};
        }
  }

 protected:
  // row_of(c, g): the staged row that is column g of tile c.
  template <typename RowOf>
  __device__ __forceinline__ void take_rows(const uint8_t* staged, Dtype dtype, RowOf row_of) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const int m = row_of(c, lane_id() / 4);
      uint32_t raw[kBlocks * kShare * 4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int j = 0; j < kShare; ++j)
          load_shared<4>(raw + (i * kShare + j) * 4,
                         staged + place(m, (i * 4 + lane_id() % 4) * kShare + j));
      float scale = 1;
      power[c][0] = power[c][1] = C::kTakesScales ? C::kWorth * codes.unit() : C::kWorth;
      if constexpr (kScaled) {
        uint32_t largest = largest_of(raw);
#pragma unroll
        for (int i = 1; i < 4; i *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, i));
        const int exponent = exponent_of(largest, dtype);
        scale = power_of_two(exponent);
#pragma unroll
        for (int e = 0; e < 2; ++e)
          power[c][e] *= power_of_two(-__shfl_sync(~0u, exponent, 8 * (lane_id() % 4) + 4 * e));
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float of_block[4] = {};
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint32_t* const word = raw + (i * kUnits + j) * C::kWordCodes / 2;
#pragma unroll
            for (int half = 0; half < 2; ++half)
              b[c][i][j][step][half] = kHasHalves && lane_id() % 4 / 2 != c
                                           ? 0
                                           : operand(word, step, half, scale, dtype);
            if constexpr (kHasSums)
              mma_m16n8k16<Element>(of_block, C::kOnes, C::kOnes, C::kOnes, C::kOnes,
                                    b[c][i][j][step]);
          }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sum[c][i][e] = of_block[e];
          if constexpr (C::kHasSums && C::kPlanes > 1) sum[c][i][e] *= codes.least();
        }
      }
    }
  }

  // For rows 8 c + 2 t and the next of x: the factor of all their results.
  float power[kColumnTiles][2];

  // Where a 16-byte piece of row m lies. Eight lanes that load together, of two rows and all
  // shares, find theirs in different banks. (Padding for the second would do too, but copies that
  // do not begin at a multiple of 128 bytes are slow.)
  static __device__ __forceinline__ int place(int m, int piece) {
    constexpr int kOdd = kShare == 4 ? 2 : kShare == 2 ? 1 : 4;
    return m * 2 * kSpanK + (piece ^ (piece >> 3 & 3) ^ m % 2 * kOdd) * 16;
  }

 private:
  // Lane (g, t) = (lane / 4, lane % 4) has row 8 c + g of x and words t * kUnits .. of each
  // block.
  uint32_t b[kColumnTiles][kBlocks][kUnits][kSteps][2];
  // For rows 8 c + 2 t and the next of x: their sums over each block.
  float sum[kColumnTiles][kBlocks][2];

  static __device__ __forceinline__ Dtype type_of(Dtype dtype) {
    if constexpr (std::is_same_v<X, AnyX>)
      return narrow(dtype);
    else
      return kDtypeOf<X>;
  }
  // The exponent of the power of two for a span whose largest element has these bits.
  static __device__ __forceinline__ int exponent_of(uint32_t largest, Dtype dtype) {
    if constexpr (!std::is_same_v<X, AnyX>) return normal_exponent<X>(largest, 15);
    const float most = float_of_bits(largest, type_of(dtype));
    return normal_exponent<float>(__float_as_uint(most), 15);
  }

  // The operand register that meets register `half` of a step, made from a word's x in pairs.
  static __device__ __forceinline__ uint32_t operand(const uint32_t* pairs, int step, int half,
                                                     float scale, Dtype dtype) {
    const int low = C::code(step, half, 0), high = C::code(step, half, 1);
    if constexpr (!kScaled)
      return __byte_perm(pairs[low / 2], pairs[high / 2],
                         (low % 2 ? 0x0032 : 0x0010) | (high % 2 ? 0x7600 : 0x5400));
    const auto value = [&](int code) {
      const uint32_t pair = pairs[code / 2];
      return float_of_bits(code % 2 ? pair >> 16 : pair & 0xffffu, type_of(dtype)) * scale;
    };
    return half_pair(value(low), value(high));
  }
};

}  // namespace jaxgemv::cuda::stream
