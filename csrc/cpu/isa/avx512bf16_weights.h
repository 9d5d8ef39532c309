// Finished weights by dot products of pairs of bfloat16, for weights_panel.h: what amx_weights.h does by tiles.
// Under the rule of kernels.h: internal linkage.
#pragma once

#include "steps.h"

namespace jaxgemv::cpu {
namespace {

// For products with so many columns, each of which is a row of x and has a lane.
class PairsProduct {
 public:
  static constexpr const char* kName = "bf16_weights";
  // Two parts would be no faster than float32.
  static constexpr bool kHasTwoParts = false;

  explicit PairsProduct(int columns) : columns_(columns) {}

  // acc[row][column] += weights[step][row][word] * x[step][pair of words][column][2], of a tile of x, and of the
  // next one's if there is a pair of them.
  void add(const uint16_t* weights, int64_t steps, int /*parts*/, const float* x0, const float* x1,
           bool is_pair, float* acc) const {
    const float* x[] = {x0, x1};
    if (is_pair)
      add_rows<8, 2>(weights, steps, x, acc);
    else
      add_rows<16, 1>(weights, steps, x, acc);
  }

 private:
  // Takes kRows rows at a time, whose sums are in registers.
  template <int kRows, int kTiles>
  void add_rows(const uint16_t* weights, int64_t steps, const float* const (&x)[2],
                float* acc) const {
    for (int row = 0; row < kRowBlock; row += kRows)
      add_block<kRows, kTiles>(weights + row * kTileWords, steps, x, acc + row * kLanes);
  }

  template <int kRows, int kTiles>
  __attribute__((noinline)) void add_block(const uint16_t* weights, int64_t steps,
                                           const float* const (&x)[2], float* acc) const {
    constexpr int64_t kSums = kRowBlock * kLanes;
    const uint16_t there = static_cast<uint16_t>((1u << columns_) - 1);
    // The panel is summed by itself, as in f32_panel.h.
    Floats sum[kTiles][kRows] = {};
    int64_t at = 0;
    for (int64_t i = 0; i < steps; ++i, weights += kRowBlock * kTileWords)
      for (int pair = 0; pair < kTileHeight; ++pair, at += columns_) {
        Ints columns[kTiles];
        JAXGEMV_UNROLL
        for (int t = 0; t < kTiles; ++t)
          columns[t] = (Ints)_mm512_maskz_loadu_epi32(there, x[t] + at);
        JAXGEMV_UNROLL
        for (int r = 0; r < kRows; ++r) {
          int32_t word;
          __builtin_memcpy(&word, weights + r * kTileWords + 2 * pair, sizeof(word));
          const Ints weight = (Ints)_mm512_set1_epi32(word);
          JAXGEMV_UNROLL
          for (int t = 0; t < kTiles; ++t) sum[t][r] = dot_pairs(sum[t][r], weight, columns[t]);
        }
      }
    JAXGEMV_UNROLL
    for (int t = 0; t < kTiles; ++t) JAXGEMV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* to = acc + t * kSums + r * kLanes;
      store_floats(to, load_floats(to) + sum[t][r]);
    }
  }

  int columns_;
};

}  // namespace
}  // namespace jaxgemv::cpu
