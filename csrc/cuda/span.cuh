// x in registers, as operand B of mma.m16n8k16, and the weights that meet it, as operand A.
//
// A step of k16 takes a packed word of a row, masked, and the same word 8 bits further, masked.
// Read as two fp16 numbers each, the codes are subnormals, q * 2^(bits * p - 24) for step p of the
// word, exact, and tensor cores multiply subnormals at full precision and speed. Which k meet in a
// step does not matter as long as x is permuted alike, so the weights keep their order in memory.
//
// x becomes fp16 by a power of two for each span of a row of x, which brings the span's largest
// element to just under 2^15: elements down to 2^-29 of it stay exact, smaller ones are off by
// 2^-40 of it at most. The factor 2^(bits * p) of step p is divided out of x, so that all steps add
// up.
#pragma once

#include "dtype.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda::stream {

template <int kBits>
struct Word {
  static constexpr int kCodes = 32 / kBits;
  static constexpr int kSteps = 8 / kBits;

  // Register `half` of a step's weights.
  static __device__ __forceinline__ uint32_t weights(uint32_t word, int step, int half) {
    const uint32_t mask = ((1u << kBits) - 1) * 0x00010001u << (kBits * step);
    return (half ? word >> 8 : word) & mask;
  }

  // The code that meets element e of register `half` of a step.
  static __device__ constexpr int code(int step, int half, int e) {
    return step + half * (8 / kBits) + e * (16 / kBits);
  }

  static __device__ constexpr float place(int step) {
    return static_cast<float>(1 << (kBits * step));
  }
};

// The exponent s for which 2^s brings numbers with these magnitude bits, and smaller ones, to just
// under 2^15.
template <typename X>
__device__ __forceinline__ int normal_exponent(uint32_t bits) {
  // A number is under 2^(biased + 1 - bias).
  if constexpr (std::is_same_v<X, __half>) return 29 - static_cast<int>(bits >> 10);
  return min(141 - static_cast<int>(bits >> 7), 126);
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

// Up to kRows rows of x and a warp's span of K, which is blocks of 4 * kLaneWords words.
template <int kBits, typename X, int kRows, int kSpanBytes, int kLaneWords>
struct SpanX {
  using W = Word<kBits>;
  static constexpr int kBlocks = kSpanBytes / (16 * kLaneWords), kSpanK = kSpanBytes * 8 / kBits;
  static constexpr int kSets = kSpanBytes / 128;  // of 32 words, one for each lane
  static constexpr int kPairs = W::kCodes / 2;

  // Lane (g, t) = (lane / 4, lane % 4) has row g of x and words t * kLaneWords .. of each block.
  uint32_t b[kBlocks][kLaneWords][W::kSteps][2];
  // Of the two columns of the product that the lane holds, 2 t and 2 t + 1: x's sums over the
  // blocks, in units of `power`.
  float sum[kBlocks][2], power[2];

  // Asks memory for the span that begins at k0; zeros past K. Lane l takes words l and l + 32.
  __device__ __forceinline__ void ask(const X* x, int rows, int K, int k0) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int j = 0; j < kSets; ++j) {
        const int k = k0 + static_cast<int>(threadIdx.x % 32 + 32 * j) * W::kCodes;
        load_words<kPairs>(raw[m][j], x + (m * int64_t{K} + k), k < K);
      }
    }
  }

  // Turns the answer into operands. `buffer` has room for a span of one row.
  __device__ __forceinline__ void take(int rows, uint32_t* buffer) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
      take_row(m, m == rows - 1, buffer);
    }
  }

 private:
  uint32_t raw[kRows][kSets][kPairs];

  __device__ __forceinline__ void take_row(int m, bool last, uint32_t* buffer) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kSets; ++j)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) largest = __vmaxu2(largest, raw[m][j][i] & 0x7fff7fffu);
    const int exponent =
        normal_exponent<X>(__reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16)));
    const float scale = power_of_two(exponent);
    const bool even = kRows == 1 || m == 2 * t, odd = kRows == 1 || m == 2 * t + 1;
#pragma unroll
    for (int j = 0; j < kSets; ++j) {
      float value[W::kCodes], total = 0;
#pragma unroll
      for (int i = 0; i < W::kCodes; ++i) {
        const uint32_t pair = raw[m][j][i / 2];
        value[i] = scale * float_of_bits(i % 2 ? pair >> 16 : pair & 0xffffu, kDtypeOf<X>);
        total += value[i];
      }
#pragma unroll
      for (int step = 0; step < W::kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          buffer[((lane + 32 * j) * W::kSteps + step) * 2 + half] =
              half_pair(value[W::code(step, half, 0)] / W::place(step),
                        value[W::code(step, half, 1)] / W::place(step));
      // A block's words are those of 4 * kLaneWords lanes.
#pragma unroll
      for (int i = 1; i < 4 * kLaneWords; i *= 2) total += __shfl_xor_sync(~0u, total, i);
#pragma unroll
      for (int i = 0; i < kBlocks / kSets; ++i) {
        const float of_block = __shfl_sync(~0u, total, i * 4 * kLaneWords);
        float (&to)[2] = sum[j * (kBlocks / kSets) + i];
        to[0] = even ? of_block : to[0], to[1] = odd ? of_block : to[1];
      }
    }
    power[0] = even ? power_of_two(-exponent) : power[0];
    power[1] = odd ? power_of_two(-exponent) : power[1];
    __syncwarp();
    // Rows past the last one repeat it and are not stored.
    if (kRows == 1 || g == m || (g > m && last)) {
      constexpr int kWords = kLaneWords * W::kSteps * 2;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        load_shared<kWords>(&b[i][0][0][0], buffer + (i * 4 + t) * kWords);
    }
    __syncwarp();
  }
};

}  // namespace jaxgemv::cuda::stream
