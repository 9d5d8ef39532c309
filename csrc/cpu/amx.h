// The tiles of AMX: eight registers, each 16 rows of 64 bytes. Under the rule of kernel.h: internal
// linkage.
#pragma once

#include "avx512.h"
#include "level.h"

namespace jaxgemv {
namespace {

constexpr int kTileHeight = 16, kTileWords = 32;

// Tiles 0 to 3 are sums, 4 and 5 are x, 6 and 7 weights. `columns`: of x and the sums.
inline void start_tiles(int columns) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = kTileHeight;
    config.row_bytes[tile] = static_cast<uint16_t>(tile < 6 ? 4 * columns : 64);
  }
  _tile_loadconfig(&config);
}

// sums[i][row][column] <- weights[i][step][row][word] * x_i[step][pair of words][column][2], kStrip
// rows of them. Two at a time, because the next product with the same sums has to wait.
template <int kSteps>
inline void multiply_tiles(const uint16_t* weights, const uint16_t* x0, const uint16_t* x1,
                           int columns, float* sums) {
  constexpr Index kTile = kTileHeight * kTileWords;
  static_assert(kStrip == 2 * kTileHeight);
  const uint16_t* w0 = weights;
  const uint16_t* w1 = weights + kSteps * 2 * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < kSteps; ++step, w0 += 2 * kTile, w1 += 2 * kTile) {
    _tile_loadd(4, x0 + step * kTileWords * columns, 4 * columns);
    _tile_loadd(6, w0, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, w0 + kTile, 64);
    _tile_dpbf16ps(1, 7, 4);
    _tile_loadd(5, x1 + step * kTileWords * columns, 4 * columns);
    _tile_loadd(6, w1, 64);
    _tile_dpbf16ps(2, 6, 5);
    _tile_loadd(7, w1 + kTile, 64);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 1 * kTileHeight * kLanes, 64);
  _tile_stored(2, sums + 2 * kTileHeight * kLanes, 64);
  _tile_stored(3, sums + 3 * kTileHeight * kLanes, 64);
}

}  // namespace
}  // namespace jaxgemv
