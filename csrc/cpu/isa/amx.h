// The tiles of AMX: eight registers, each 16 rows of 64 bytes. Under the rule of kernels.h: internal
// linkage.
#pragma once

#include "../table.h"
#include "avx512bf16.h"
#include "steps.h"

// A compiler barrier: gcc 12 does not know that tiles are loaded from memory, and would move earlier stores behind.
#define JAXGEMV_STORED __asm__ volatile("" ::: "memory")

namespace jaxgemv::cpu {
namespace {

// Tiles 0 to 3 are sums, 4 and 5 are x: so many rows of so many bytes. 6 and 7 are weights, and whole.
inline void start_tiles(int rows, int bytes) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileHeight);
    config.row_bytes[tile] = static_cast<uint16_t>(tile < 6 ? bytes : kTileBytes);
  }
  JAXGEMV_STORED;
  _tile_loadconfig(&config);
}
// For a product with so many columns, each 4 bytes of a tile's row.
inline void start_tiles(int columns) { start_tiles(kTileHeight, 4 * columns); }

// kRowBlock rows of kTileBytes bytes, as two tiles: each row begins `stride` bytes after the one before it.
struct TileRows {
  const uint8_t *first, *second;
  int64_t stride;

  TileRows() = default;
  TileRows(const uint8_t* first, const uint8_t* second, int64_t stride)
      : first(first), second(second), stride(stride) {}
  explicit TileRows(const uint8_t* rows)  // with nothing between
      : TileRows(rows, rows + kTileHeight * kTileBytes, kTileBytes) {}
};

// sums[row][column] <- the sum over i < count of weights[i][row][byte] * x[i][4 bytes][column][byte], and the same
// for the next tile of columns if there is a pair of them.
inline void multiply_tiles(const TileRows* weights, int64_t count, const uint8_t* x0, int columns,
                           bool is_pair, int32_t* sums) {
  const int64_t size = kTileBytes * columns;
  const uint8_t* x1 = x0 + count * size;
  JAXGEMV_STORED;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (const TileRows* end = weights + count; weights < end; ++weights, x0 += size, x1 += size) {
    _tile_loadd(4, x0, 4 * columns);
    _tile_loadd(6, weights->first, weights->stride);
    _tile_dpbusd(0, 6, 4);
    _tile_loadd(7, weights->second, weights->stride);
    _tile_dpbusd(1, 7, 4);
    if (is_pair) {
      _tile_loadd(5, x1, 4 * columns);
      _tile_dpbusd(2, 6, 5);
      _tile_dpbusd(3, 7, 5);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileHeight * kLanes, 64);
  if (is_pair) {
    _tile_stored(2, sums + kRowBlock * kLanes, 64);
    _tile_stored(3, sums + (kRowBlock + kTileHeight) * kLanes, 64);
  }
}

// words[i][slice]: bytes of z[4 i], z[4 i + 1], .., where every byte but the lowest has taken up
// what the one below it borrowed.
inline void slices_of_eight(const int64_t* z, uint32_t (&words)[2][8]) {
  const __m512i bias = _mm512_set1_epi8(-128);
  const __m512i slices =
      _mm512_xor_si512(_mm512_maskz_add_epi64(0xff, _mm512_loadu_si512(z), bias), bias);
  alignas(64) static constexpr uint8_t kPairs[16] = {0, 8,  1, 9,  2, 10, 3, 11,
                                                     4, 12, 5, 13, 6, 14, 7, 15};
  alignas(64) static constexpr uint16_t kWords[32] = {0,  8,  1,  9,  2,  10, 3,  11, 4,  12, 5,
                                                      13, 6,  14, 7,  15, 16, 24, 17, 25, 18, 26,
                                                      19, 27, 20, 28, 21, 29, 22, 30, 23, 31};
  const __m512i pairs = _mm512_shuffle_epi8(
      slices, _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128((const __m128i*)kPairs)));
  _mm512_storeu_si512(words, _mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(kWords), pairs));
}

// sums[i][row][column] <- weights[i][step][row][word] * x_i[step][pair of words][column][2], for kRowBlock
// rows. Two products at a time, because the next one with the same sums has to wait.
template <int kSteps>
inline void multiply_tiles(const uint16_t* weights, const uint16_t* x0, const uint16_t* x1,
                           int columns, float* sums) {
  constexpr Index kTile = kTileHeight * kTileWords;
  static_assert(kRowBlock == 2 * kTileHeight);
  const uint16_t* w0 = weights;
  const uint16_t* w1 = weights + kSteps * 2 * kTile;
  JAXGEMV_STORED;
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
}  // namespace jaxgemv::cpu
