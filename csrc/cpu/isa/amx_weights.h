// Finished weights by AMX, for weights_panel.h. Under the rule of kernels.h: internal linkage.
#pragma once

#include "amx.h"

namespace jaxgemv::cpu {
namespace {

// For products of so many columns, of which each is a row of x.
class AmxProduct {
 public:
  static constexpr const char* kName = "amx_panel";
  static constexpr bool kHasTwoParts = true;  // of a weight

  explicit AmxProduct(int columns) : columns_(columns) { start_tiles(columns); }
  ~AmxProduct() { _tile_release(); }
  AmxProduct(const AmxProduct&) = delete;
  AmxProduct& operator=(const AmxProduct&) = delete;

  // acc[half of kRowBlock][row][column] += weights[step][part][half][row][word] * x[step][pair of words][column][2],
  // of a tile of x, and of the next one's if there is a pair of them.
  void add(const uint16_t* weights, int64_t steps, int parts, const float* x0, const float* x1,
           bool is_pair, float* acc) const {
    constexpr int64_t kTile = kTileHeight * kTileWords, kSums = kTileHeight * kLanes;
    const int64_t size = kTileHeight * columns_;
    float* next = acc + 2 * kSums;
    JAXGEMV_STORED;
    _tile_loadd(0, acc, kTileBytes);
    _tile_loadd(1, acc + kSums, kTileBytes);
    if (is_pair) {
      _tile_loadd(2, next, kTileBytes);
      _tile_loadd(3, next + kSums, kTileBytes);
    }
    for (int64_t i = 0; i < steps; ++i, x0 += size, x1 += size) {
      _tile_loadd(4, x0, 4 * columns_);
      if (is_pair) _tile_loadd(5, x1, 4 * columns_);
      for (int part = 0; part < parts; ++part, weights += 2 * kTile) {
        _tile_loadd(6, weights, kTileBytes);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, weights + kTile, kTileBytes);
        _tile_dpbf16ps(1, 7, 4);
        if (is_pair) {
          _tile_dpbf16ps(2, 6, 5);
          _tile_dpbf16ps(3, 7, 5);
        }
      }
    }
    _tile_stored(0, acc, kTileBytes);
    _tile_stored(1, acc + kSums, kTileBytes);
    if (is_pair) {
      _tile_stored(2, next, kTileBytes);
      _tile_stored(3, next + kSums, kTileBytes);
    }
    JAXGEMV_STORED;
  }

 private:
  int columns_;
};

}  // namespace
}  // namespace jaxgemv::cpu
