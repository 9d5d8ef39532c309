// Scales that go into the operand: a tile's products add up over a whole span, whatever groups it has.
#pragma once

#include "pipeline.cuh"
#include "x_fp16.cuh"

namespace jaxgemv::cuda::stream {

// The scales of a tile's rows g and g + 8 that meet the codes of lane t: its share of a block is 32 codes.
//   begin()     whether there is anything to multiply
//   scale(r, i, j)  what the codes of word j of block i in row g + 8 r are multiplied with
//   factor()    what the sums are worth
template <Scales kScales, typename Decoder, int kBlocks>
struct OperandScales;

// e4m3 for 16 codes.
template <typename Decoder, int kBlocks>
struct OperandScales<Scales::kE4M3, Decoder, kBlocks> {
  static constexpr bool kInPasses = false;
  __half2 pairs[2][kBlocks];

  __device__ __forceinline__ OperandScales(const uint8_t* of_tile, int) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint8_t* const at =
            of_tile + (g + 8 * r) * operand_scale_bytes(Scales::kE4M3) + (i * 4 + t) * 2;
        pairs[r][i] =
            half2_of(pair_of_float8<Format::kE4M3>(*reinterpret_cast<const unsigned short*>(at)));
        if (Decoder::kE4M3 != 1)
          pairs[r][i] = __hmul2(pairs[r][i], __float2half2_rn(Decoder::kE4M3));
      }
  }
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ bool end() { return true; }
  __device__ __forceinline__ __half2 scale(int r, int i, int j) const {
    return j < 2 ? __low2half2(pairs[r][i]) : __high2half2(pairs[r][i]);
  }
  static __device__ __forceinline__ float factor() { return 1 / Decoder::kE4M3; }
};

// e8m0 for 32 codes: powers of two by the largest of the tile, in passes. The first has the largest and
// those that are exact beside it, which is nearly always all.
template <typename Decoder, int kBlocks>
struct OperandScales<Scales::kE8M0, Decoder, kBlocks> {
  static constexpr int kDone = -512, kNan = 255;
  int left[2][kBlocks];  // exponents
  uint32_t powers[2][kBlocks];
  int top;
  bool last;

  // blocks: of the span that lie within the row.
  __device__ __forceinline__ OperandScales(const uint8_t* of_tile, int blocks) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        left[r][i] = of_tile[(g + 8 * r) * operand_scale_bytes(Scales::kE8M0) + t +
                             4 * (i < blocks ? i : 0)];
  }

  __device__ __forceinline__ void begin() {
    int least = left[0][0];
    top = least;
#pragma unroll
    for (int i = 1; i < 2 * kBlocks; ++i) {
      top = max(top, left[i / kBlocks][i % kBlocks]);
      least = min(least, left[i / kBlocks][i % kBlocks]);
    }
    top = __reduce_max_sync(~0u, top);
    last = __all_sync(~0u, least > top - Decoder::kSpread && top < kNan);
    top = min(top, kNan - 1);
    constexpr uint32_t kExponent = 0x04000400;  // of two fp16
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        powers[r][i] = static_cast<uint32_t>(left[r][i] + (Decoder::kTop + 15 - top)) * kExponent;
    if (last) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        if (left[r][i] == kNan)
          powers[r][i] = 0x7e007e00;
        else if (left[r][i] <= top - Decoder::kSpread)
          powers[r][i] = 0;
  }
  // Whether that was all.
  __device__ __forceinline__ bool end() {
    if (last) return true;
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (left[r][i] > top - Decoder::kSpread) left[r][i] = kDone;
        any |= left[r][i] != kDone;
      }
    return !__any_sync(~0u, any);
  }
  __device__ __forceinline__ __half2 scale(int r, int i, int) const {
    return half2_of(powers[r][i]);
  }
  __device__ __forceinline__ float factor() const {
    constexpr float kPower = 1.f / static_cast<float>(1 << Decoder::kTop);
    return __uint_as_float(bits_of_e8m0(static_cast<uint32_t>(top))) * kPower;
  }
};

// A tile times a span of x.
template <Scales kScales, int kSpanBytes, int kLaneWords, typename Decoder, typename Span>
__device__ __forceinline__ void multiply_scaled(const Decoder& codes, const uint8_t* weights,
                                                const uint8_t* scales, int blocks, const Span& xs,
                                                float (&y)[Span::kResults]) {
  static_assert(kLaneWords == 4);  // 32 codes
  const int g = lane_id() / 4, t = lane_id() % 4;
  OperandScales<kScales, Decoder, Span::kBlocks> of(scales, blocks);
  do {
    of.begin();
    float sums[Span::kResults / 4][2][4] = {};
#pragma unroll
    for (int i = 0; i < Span::kBlocks; ++i) {
      uint32_t w[2][kLaneWords];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        load_shared<kLaneWords>(
            w[r], weights + (g + 8 * r) * kSpanBytes + ((i * 4 + t) * 4 * kLaneWords ^ g % 2 * 64));
      xs.add_products(
          [&](int r, int j, int step, int half) {
            return codes.product(w[r][j], step, half, of.scale(r, i, j));
          },
          i, 0, sums);
    }
    const float worth = of.factor() * codes.worth();
#pragma unroll
    for (int e = 0; e < Span::kResults; ++e)
      y[e] = fmaf(worth, sums[e / 4][0][e % 4] + sums[e / 4][1][e % 4], y[e]);
  } while (!of.end());
}

}  // namespace jaxgemv::cuda::stream
