// Scales that are multiplied into operand A: a tile's products add up over a whole span, however many groups it has.
#pragma once

#include "pipeline.cuh"
#include "x_pairs.cuh"

namespace jaxgemv::cuda::stream {

// The scales of a tile's rows g and g + 8 for the codes of lane t, whose share of a block is 32 codes.
//   begin(), end()  of a pass over the tile's codes; end() says whether it was the last
//   scale(r, i, j)  the factor for the codes of word j of block i in row g + 8 r
//   factor()        what the sums have to be multiplied with
template <Scales kScales, typename Decoder, int kBlocks>
struct OperandScales;

// For e8m0 scales, kept from tile to tile: the least exponent that the window holds exactly, and its factor.
struct Window {
  int least = 1 << 16;
  float factor = 0;
};

// One e4m3 scale for 16 codes.
template <typename Decoder, int kBlocks>
struct OperandScales<Scales::kE4M3, Decoder, kBlocks> {
  __half2 pairs[2][kBlocks];

  __device__ __forceinline__ OperandScales(const uint8_t* of_tile, int, Window&) {
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

// One e8m0 scale for 32 codes: powers of two, relative to a window within which all are exact. A tile whose scales
// span more takes several passes; nearly always the window of the tile before will do, or else a single new one.
template <typename Decoder, int kBlocks>
struct OperandScales<Scales::kE8M0, Decoder, kBlocks> {
  static constexpr int kDone = -512, kNan = 255;
  int left[2][kBlocks];  // exponents
  uint32_t powers[2][kBlocks];
  Window& window;
  bool last;

  // blocks: those of the span that lie within the row.
  __device__ __forceinline__ OperandScales(const uint8_t* of_tile, int blocks, Window& window)
      : window(window) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        left[r][i] = of_tile[(g + 8 * r) * operand_scale_bytes(Scales::kE8M0) + t +
                             4 * (i < blocks ? i : 0)];
  }

  __device__ __forceinline__ void begin() {
    last = make_powers();
    if (last) return;
    int top = kDone;
    each([&](int exponent, uint32_t&) { top = max(top, exponent); });
    top = min(__reduce_max_sync(~0u, top), kNan - 1);
    window.least = top - Decoder::kSpread + 1;
    window.factor = __uint_as_float(bits_of_e8m0(static_cast<uint32_t>(top))) /
                    static_cast<float>(1 << Decoder::kTop);
    last = make_powers();
    each([&](int exponent, uint32_t& power) {
      if (exponent == kNan)
        power = 0x7e007e00;
      else if (exponent < window.least)
        power = 0;
    });
  }
  __device__ __forceinline__ bool end() {
    if (last) return true;
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (left[r][i] >= window.least) left[r][i] = kDone;
        any |= left[r][i] != kDone;
      }
    return !__any_sync(~0u, any);
  }
  __device__ __forceinline__ __half2 scale(int r, int i, int) const {
    return half2_of(powers[r][i]);
  }
  __device__ __forceinline__ float factor() const { return window.factor; }

 private:
  template <typename Do>
  __device__ __forceinline__ void each(Do&& act) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i)
      act(left[i / kBlocks][i % kBlocks], powers[i / kBlocks][i % kBlocks]);
  }
  // Makes the powers of two. Returns whether all scales of the tile lie in the window.
  __device__ __forceinline__ bool make_powers() {
    constexpr uint32_t kExponent = 0x04000400;  // of two fp16
    constexpr uint32_t kLeast = Decoder::kTop + 15 - Decoder::kSpread + 1;
    uint32_t most = 0;
    each([&](int exponent, uint32_t& power) {
      const uint32_t above = static_cast<uint32_t>(exponent - window.least);
      most = max(most, above);
      power = above * kExponent + kLeast * kExponent;
    });
    return __all_sync(~0u, most < Decoder::kSpread);
  }
};

// y += a tile's products with a span of x.
template <Scales kScales, typename Rows, typename Decoder, typename Span>
__device__ __forceinline__ void multiply_scaled(const Decoder& codes, const uint8_t* weights,
                                                const uint8_t* scales, int blocks, Window& window,
                                                const Span& xs, float (&y)[Span::kResults]) {
  OperandScales<kScales, Decoder, Span::kBlocks> of(scales, blocks, window);
  do {
    of.begin();
    float sums[Span::kResults / 4][2][4] = {};
#pragma unroll
    for (int i = 0; i < Span::kBlocks; ++i) {
      uint32_t w[2][4];  // 32 codes of a row
      Rows::load(w, weights, i);
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
