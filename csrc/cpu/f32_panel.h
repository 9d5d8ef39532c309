// Any number of rows of x and any of its values, any width and any group. Under the rule of
// isa/kernels.h: internal linkage.
//
// A lane holds a row of weights: words of kLanes rows are transposed, and code k then has the same
// place in every lane. A panel, kPanelCodes codes of kRowBlock rows, becomes float32 once and is
// multiplied with all rows of x while the first-level cache holds it.
#pragma once

#include <utility>

#include "common/codes.h"
#include "common/epilogue.h"
#include "common/params.h"
#include "common/x.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kPanelCodes = 128;
static_assert(kRowBlock % (kTileVectors * kLanes) == 0);

// acc[m][lane] += x[m][k] * panel[k][lane], for kTileVectors vectors of lanes. Rows of x are
// kPanelCodes apart, so that one register addresses them all.
template <int kRows>
inline void multiply_tile(const float* panel, const float* x, Index count, float* acc) {
  Floats sum[kRows][kTileVectors];
  JAXGEMV_UNROLL
  for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
  for (int v = 0; v < kTileVectors; ++v) sum[m][v] = load_floats(acc + m * kRowBlock + v * kLanes);
  // The next tile's x, which many rows keep in the second-level cache.
  const float* ahead = x + kRows * kPanelCodes;
  for (Index k = 0; k < count; ++k, panel += kRowBlock, ++x, ahead += kRows) {
    __builtin_prefetch(ahead);
    Floats w[kTileVectors];
    JAXGEMV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) w[v] = load_floats(panel + v * kLanes);
    JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) sum[m][v] += w[v] * x[m * kPanelCodes];
  }
  JAXGEMV_UNROLL
  for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
  for (int v = 0; v < kTileVectors; ++v) store_floats(acc + m * kRowBlock + v * kLanes, sum[m][v]);
}

// The same for all lanes of a panel and up to kRows rows of x.
template <int kRows = kTileRows>
inline void multiply(Index rows, const float* panel, const float* x, Index count, float* acc) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply<kRows - 1>(rows, panel, x, count, acc);
  for (int lane = 0; lane < kRowBlock; lane += kTileVectors * kLanes)
    multiply_tile<kRows>(panel + lane, x, count, acc + lane);
}

template <typename C>
struct F32Panel {
  static constexpr const char* kName = "f32_panel";
  static constexpr int kRows = kAllRows;
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype) { return true; }
  static constexpr int kBits = C::kBits;
  static constexpr int kChunkCodes = 32;  // these are kBits words
  static constexpr int kWords = kPanelCodes / kChunkCodes * kBits;

  static bool supports(const Problem&, const Operands&) { return true; }

  static Index panels_of(const Problem& p) { return ceil_div(p.K, Index{kPanelCodes}); }

  // [panel][row][code]
  static Index x_size(const Problem& p, const Operands&) {
    return panels_of(p) * p.M * kPanelCodes;
  }
  static void prepare(const Problem&, const Operands&, float*) {}
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    for (Index k = 0; k < p.K; k += kPanelCodes, out += p.M * kPanelCodes)
      for (Index m = m0; m < m1; ++m)
        x.read(m, k, min_of(kPanelCodes, p.K - k), out + m * kPanelCodes);
    return true;
  }

  // Of a task.
  struct Scratch {
    float* acc;       // [row of x][lane]
    float* panel;     // [code][lane]
    float* by_group;  // [group][scale, offset][lane]
    float* by_row;    // [row of kLanes][scale, offset][group]
    int32_t* places;  // [code]: of its group in by_group
    Index size;

    Scratch(const Problem& p, float* at) {
      acc = at;
      panel = acc + p.M * kRowBlock;
      by_group = panel + kPanelCodes * kRowBlock;
      by_row = by_group + padded(groups_of(p)) * 2 * kRowBlock;
      float* end = by_row + padded(groups_of(p)) * 2 * kLanes;
      places = reinterpret_cast<int32_t*>(end);
      size = end - at + panels_of(p) * kPanelCodes;
    }
  };

  static Index scratch_size(const Problem& p, const Operands&) { return Scratch(p, nullptr).size; }

  static void place_groups(const Problem& p, int32_t* places) {
    int32_t at = 0;
    for (Index k = 0, left = p.group; k < panels_of(p) * kPanelCodes; ++k) {
      places[k] = at;
      if (--left == 0 && k + 1 < p.K) at += 2 * kRowBlock, left = p.group;
    }
  }

  // panel[k][lane] <- weights k0 .. k0 + kPanelCodes of kRowBlock rows, with anything behind K.
  static void unpack(const C& codes, const Problem& p, const uint8_t* const* rows, Index k0,
                     const Scratch& s) {
    const Index first = k0 / kChunkCodes * kBits, left = row_bytes(p.K, kBits) / 4 - first;
    for (int lane = 0; lane < kRowBlock; lane += kLanes, rows += kLanes) {
      Ints word[ceil_div(kWords, kLanes) * kLanes + 1];
      for (int w = 0; w < kWords; w += kLanes) {
        Ints square[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          const uint8_t* from = rows[j] + (first + w) * 4;
          square[j] = left - w >= kLanes ? load_words(from) : load_words(from, max_of(0, left - w));
        }
        transpose(square);
        for (int j = 0; j < kLanes; ++j) word[w + j] = square[j];
      }
      for (int chunk = 0; chunk < kPanelCodes / kChunkCodes; ++chunk) {
        const int32_t* places = s.places + k0 + chunk * kChunkCodes;
        float* to = s.panel + chunk * kChunkCodes * kRowBlock + lane;
        constexpr std::make_integer_sequence<int, kChunkCodes> kAll;
        if (places[0] == places[kChunkCodes - 1])
          unpack_chunk<true>(codes, word + chunk * kBits, s.by_group + lane, places, to, kAll);
        else
          unpack_chunk<false>(codes, word + chunk * kBits, s.by_group + lane, places, to, kAll);
      }
    }
  }

  // Not inlined: gcc would work out the codes once for both forms, and keep them in memory.
  template <bool kOneGroup, int... kCode>
  __attribute__((noinline)) static void unpack_chunk(const C& codes, const Ints* words,
                                                     const float* params, const int32_t* places,
                                                     float* panel,
                                                     std::integer_sequence<int, kCode...>) {
    Ints word[kBits];  // in registers: the stores below might be to `words`, for all compilers know
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    Floats scale = load_floats(params + places[0]),
           offset = load_floats(params + places[0] + kRowBlock);
    const auto weight = [&](Floats code, int i) {
      if (!kOneGroup)
        scale = load_floats(params + places[i]),
        offset = load_floats(params + places[i] + kRowBlock);
      return code * scale + offset;
    };
    (store_floats(panel + kCode * kRowBlock, weight(value<kCode>(codes, word), kCode)), ...);
  }

  // Of code i of a chunk.
  template <int i>
  static Floats value(const C& codes, const Ints (&word)[kBits]) {
    constexpr int kAt = i * kBits / 32, kShift = i * kBits % 32, kHere = 32 - kShift;
    Ints code = word[kAt] >> kShift;
    if constexpr (kHere < kBits) code = (code & ((1 << kHere) - 1)) | word[kAt + 1] << kHere;
    if constexpr (C::kLookup)
      return lookup(codes.all(), code);
    else
      return codes.convert(code);
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const C codes(p, o, stack);
    const Epilogue epilogue = {p, o, slice, stack};
    const Scratch s(p, scratch);
    const Index tiles = ceil_div(p.M, Index{kTileRows}), bytes = row_bytes(p.K, kBits);
    place_groups(p, s.places);
    for (Index n0 = begin; n0 < end; n0 += RowBlock::rows(p)) {
      const RowBlock block(p, n0, end);
      const uint8_t* rows[kRowBlock];
      block.point_at(p, o, stack, rows);
      load_params_by_group<C>(p, o, stack, block, s.by_row, s.by_group);
      for (Index i = 0; i < kRowBlock * p.M; ++i) s.acc[i] = 0;
      const float* tile_x = x;
      for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes) {
        // The next block, in the order of memory.
        constexpr Index kPanelBytes = kRowBlock * kWords * 4;
        const uint8_t* ahead = block.next(rows, k0 / kPanelCodes * kPanelBytes, bytes);
        for (Index line = 0; line < kPanelBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        unpack(codes, p, rows, k0, s);
        for (Index tile = 0, m = 0, next; tile < tiles; ++tile, m = next) {
          next = (tile + 1) * p.M / tiles;
          multiply(next - m, s.panel, tile_x, min_of(kPanelCodes, p.K - k0), s.acc + m * kRowBlock);
          tile_x += (next - m) * kPanelCodes;
        }
      }
      for (Index m = 0; m < p.M; ++m) {
        const float* sums = s.acc + m * kRowBlock;
        epilogue.store(m, n0, block.count, sums, sums + kRowBlock / 2);
      }
    }
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
