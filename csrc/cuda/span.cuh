// x as operand B of mma.m16n8k16, and the weights that meet it, as operand A.
//
// A step of k16 takes a packed word of a row, masked, and the same word 8 bits further, masked.
// Read as two fp16 numbers each, the codes are subnormals, q * 2^(bits * p - 24) for step p of the
// word, exact, and tensor cores multiply subnormals at full precision and speed. Which k meet in a
// step does not matter as long as x is permuted alike, so the weights keep their order in memory.
//
// float16 x only changes its order. bfloat16 x becomes fp16 by a power of two for each span of a
// row of x, which brings the span's largest element to just under 2^15: elements down to 2^-29 of
// it stay exact, smaller ones are off by 2^-40 of it at most. The factor 2^(bits * p) of step p is
// then divided out of x, so that all steps add up.
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

  // The code that meets element e of register `half` of a step; its step is code % kSteps.
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
class SpanX {
  using W = Word<kBits>;
  static constexpr int kShare = kLaneWords * W::kCodes / 8;  // 16-byte pieces of a block for a lane
  static_assert(kShare >= 1);

 public:
  static constexpr int kBlocks = kSpanBytes / (16 * kLaneWords), kSpanK = kSpanBytes * 8 / kBits;
  static constexpr int kColumnTiles = (kRows + 7) / 8;  // of an mma's 8 columns
  static constexpr int kRowBytes = 2 * kSpanK;
  // Four places in a word would need as many accumulators, so they are divided out of x too.
  static constexpr bool kScaled = !std::is_same_v<X, __half> || kBits == 2;

  // Lane (g, t) = (lane / 4, lane % 4) has row 8 c + g of x and words t * kLaneWords .. of each
  // block.
  uint32_t b[kColumnTiles][kBlocks][kLaneWords][W::kSteps][2];
  // Of the two columns of a product that the lane holds, 8 c + 2 t and the next: x's sums over the
  // blocks, in units of `power`.
  float sum[kColumnTiles][kBlocks][2], power[kColumnTiles][2];

  // Starts the copy of the span that begins at k0; zeros past K.
  static __device__ __forceinline__ void ask(const X* x, int rows, int K, int k0, uint8_t* staged) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int k = k0 + 8 * (lane() + 32 * j);
        copy_or_zeros<16>(staged + place(m, lane() + 32 * j), x + (m * Index{K} + k), k < K);
      }
    }
  }

  // Turns what this warp's copies have brought into operands.
  __device__ __forceinline__ void take(int rows, uint8_t* staged) {
    // One row is fp16 before all lanes load it; of more rows each lane has its own part to convert.
    constexpr bool kFirst = kScaled && kRows == 1, kLater = kScaled && kRows > 1;
    if constexpr (kFirst) normalise(staged);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      // Rows past the last one repeat it and are not stored.
      const int m = min(8 * c + lane() / 4, rows - 1);
      uint32_t raw[kBlocks][kShare * 4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) load_block(raw[i], staged, m, i);
      float scale = 1;
      if constexpr (kLater) {
        uint32_t largest = 0;
#pragma unroll
        for (const auto& block : raw) largest = __vmaxu2(largest, largest_of(block));
#pragma unroll
        for (int i = 1; i < 4; i *= 2)
          largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, i));
        const int exponent = exponent_of(largest);
        scale = power_of_two(exponent);
#pragma unroll
        for (int e = 0; e < 2; ++e)
          power[c][e] = power_of_two(-__shfl_sync(~0u, exponent, 8 * (lane() % 4) + 4 * e));
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float of_block[4] = {};
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j)
#pragma unroll
          for (int step = 0; step < W::kSteps; ++step) {
            const float place = kScaled ? W::place(step) : 1.f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int low = W::code(step, half, 0), high = W::code(step, half, 1);
              const uint32_t pair[2] = {raw[i][(j * W::kCodes + low) / 2],
                                        raw[i][(j * W::kCodes + high) / 2]};
              uint32_t& to = b[c][i][j][step][half];
              if constexpr (kLater)
                to = half_pair(value(pair[0], low % 2) * (scale / place),
                               value(pair[1], low % 2) * (scale / place));
              else
                to = __byte_perm(pair[0], pair[1], low % 2 ? 0x7632 : 0x5410);
            }
            const uint32_t ones = half_pair(place, place);
            mma_m16n8k16<__half>(of_block, ones, ones, ones, ones, b[c][i][j][step]);
          }
        sum[c][i][0] = of_block[0], sum[c][i][1] = of_block[1];
      }
    }
  }

 private:
  static constexpr int kPieces = kSpanK / 256;  // that a lane copies of a row

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  // Where a 16-byte piece of row m lies. Eight lanes that load together, of two rows and all
  // shares, find theirs in different banks. (Padding for the second would do too, but copies that
  // do not begin at a multiple of 128 bytes are slow.)
  static __device__ __forceinline__ int place(int m, int piece) {
    constexpr int kOdd = kShare == 4 ? 2 : kShare == 2 ? 1 : 4;
    return m * kRowBytes + (piece ^ (piece >> 3 & 3) ^ m % 2 * kOdd) * 16;
  }

  static __device__ __forceinline__ void load_block(uint32_t (&to)[kShare * 4],
                                                    const uint8_t* staged, int m, int block) {
#pragma unroll
    for (int j = 0; j < kShare; ++j)
      load_shared<4>(to + 4 * j, staged + place(m, (block * 4 + lane() % 4) * kShare + j));
  }

  template <int kPairs>
  static __device__ __forceinline__ uint32_t largest_of(const uint32_t (&pairs)[kPairs]) {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t pair : pairs) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
    return largest;
  }
  static __device__ __forceinline__ int exponent_of(uint32_t largest) {
    return normal_exponent<X>(max(largest & 0xffffu, largest >> 16));
  }
  static __device__ __forceinline__ float value(uint32_t pair, bool high) {
    return float_of_bits(high ? pair >> 16 : pair & 0xffffu, kDtypeOf<X>);
  }

  // Makes fp16 of one row, in place.
  __device__ __forceinline__ void normalise(uint8_t* staged) {
    uint32_t raw[kPieces][4], largest = 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      load_shared<4>(raw[j], staged + place(0, lane() + 32 * j));
      largest = __vmaxu2(largest, largest_of(raw[j]));
    }
    const int exponent = __reduce_min_sync(~0u, exponent_of(largest));
    power[0][0] = power_of_two(-exponent);
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = scale / W::place(2 * i % W::kSteps),
                    high = scale / W::place((2 * i + 1) % W::kSteps);
        raw[j][i] = half_pair(value(raw[j][i], false) * low, value(raw[j][i], true) * high);
      }
      store_shared16(staged + place(0, lane() + 32 * j), raw[j]);
    }
    __syncwarp();
  }
};

}  // namespace jaxgemv::cuda::stream
