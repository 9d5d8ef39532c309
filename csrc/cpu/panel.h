// Any number of rows of x, any width and any group. Part of kernel.h, and under its rule: internal
// linkage.
//
// A lane holds a row of weights: words of kLanes rows are transposed, and code k then has the same
// place in every lane. A panel, kPanelCodes codes of kStrip rows, becomes float32 once and is
// multiplied with all rows of x while the first-level cache holds it.
#pragma once

#include "params.h"

namespace jaxgemv {
namespace {

constexpr Index kPanelCodes = 128;
constexpr int kPanelVectors = kStrip / kLanes;

template <int kBits>
struct Panel {
  static constexpr int kChunkCodes = 32;  // these are kBits words

  // Rows of x in the tile of the row m.
  static Index tile_rows(const Problem& p, Index m) {
    Index rows = kTileRows;
    while (rows > p.M - m) rows /= 2;
    return rows;
  }

  static Index arranged_size(const Problem& p) { return p.M * p.K; }

  // [tile][k][row of the tile]
  static bool arrange(const Problem& p, const Operands& o, Index slice, float* out) {
    float natural[kPanelCodes];
    for (Index m0 = 0, rows; m0 < p.M; m0 += rows, out += rows * p.K) {
      rows = tile_rows(p, m0);
      for (Index k = 0; k < p.K; k += kPanelCodes) {
        const Index count = min_of(kPanelCodes, p.K - k);
        for (Index m = 0; m < rows; ++m) {
          read_floats(p.x, o.x, (slice * p.M + m0 + m) * p.K + k, count, natural);
          for (Index i = 0; i < count; ++i) out[(k + i) * rows + m] = natural[i];
        }
      }
    }
    return true;
  }

  // Accumulators, a panel, and the parameters by group and lane.
  static Index scratch_size(const Problem& p) {
    return kStrip * (p.M + kPanelCodes + 2 * padded(groups_of(p)));
  }

  // panel[k][lane] <- codes k0 .. k0 + count of kStrip rows.
  static void unpack(const Problem& p, const uint8_t* const* rows, Index k0, float* panel) {
    const Index words = row_bytes(p.K, kBits) / 4, first = k0 / 32 * kBits;
    constexpr Index kWords = kPanelCodes / 32 * kBits;
    for (int v = 0; v < kPanelVectors; ++v, rows += kLanes) {
      Ints word[ceil_div(kWords, kLanes) * kLanes + 1];
      for (Index w = 0; w < kWords; w += kLanes) {
        Ints square[kLanes];
        const Index left = words - first - w;
        for (int j = 0; j < kLanes; ++j) {
          const uint8_t* from = rows[j] + (first + w) * 4;
          __builtin_prefetch(from + kWords * 4);  // of the next panel: each row is another page
          square[j] = left >= kLanes ? load_words(from) : load_words(from, max_of(0, left));
        }
        transpose(square);
        for (int j = 0; j < kLanes; ++j) word[w + j] = square[j];
      }
      for (int chunk = 0; chunk < kPanelCodes / kChunkCodes; ++chunk)
        unpack_chunk(word + chunk * kBits, panel + (chunk * kChunkCodes) * kStrip + v * kLanes,
                     std::make_integer_sequence<int, kChunkCodes>());
    }
  }

  template <int... kCode>
  static void unpack_chunk(const Ints* word, float* panel, std::integer_sequence<int, kCode...>) {
    (store_floats(panel + kCode * kStrip, to_floats(code<kCode>(word))), ...);
  }

  // Code i of a chunk.
  template <int i>
  static Ints code(const Ints* word) {
    constexpr int kAt = i * kBits / 32, kShift = i * kBits % 32, kMask = (1 << kBits) - 1;
    if constexpr (kShift + kBits <= 32) {
      return word[kAt] >> kShift & kMask;
    } else {
      constexpr int kHere = 32 - kShift;
      return (word[kAt] >> kShift & ((1 << kHere) - 1)) | (word[kAt + 1] << kHere & kMask);
    }
  }

  // Codes to weights, in place.
  static void scale(const Problem& p, Index k0, Index count, const float* by_group, float* panel) {
    for (Index i = 0; i < count;) {
      const Index g = (k0 + i) / p.group, end = min_of((g + 1) * p.group - k0, count);
      Floats scale[kPanelVectors], offset[kPanelVectors];
      JAXGEMV_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        scale[v] = load_floats(by_group + g * 2 * kStrip + v * kLanes);
        offset[v] = load_floats(by_group + (g * 2 + 1) * kStrip + v * kLanes);
      }
      for (; i < end; ++i) JAXGEMV_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) {
        float* at = panel + i * kStrip + v * kLanes;
        store_floats(at, load_floats(at) * scale[v] + offset[v]);
      }
    }
  }

  // acc[m][lane] += panel[k][lane] * x[k][m]
  template <int kRows>
  static void multiply(const float* panel, const float* x, Index count, float* acc) {
    Floats sum[kRows][kPanelVectors];
    JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) sum[m][v] = load_floats(acc + m * kStrip + v * kLanes);
    for (Index k = 0; k < count; ++k, panel += kStrip, x += kRows) {
      Floats w[kPanelVectors];
      JAXGEMV_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) w[v] = load_floats(panel + v * kLanes);
      JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) sum[m][v] += w[v] * x[m];
    }
    JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) store_floats(acc + m * kStrip + v * kLanes, sum[m][v]);
  }

  static void multiply(Index rows, const float* panel, const float* x, Index count, float* acc) {
    if (rows == 8) return multiply<8>(panel, x, count, acc);
    if (rows == 4) return multiply<4>(panel, x, count, acc);
    if (rows == 2) return multiply<2>(panel, x, count, acc);
    multiply<1>(panel, x, count, acc);
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const Index groups = groups_of(p);
    float* acc = scratch;
    float* panel = acc + kStrip * p.M;
    float* by_group = panel + kStrip * kPanelCodes;  // [group][scale, offset][lane]
    for (Index n0 = begin; n0 < end; n0 += kStrip) {
      const uint8_t* rows[kStrip];
      for (Index r = 0; r < kStrip; ++r) {
        const Index n = min_of(n0 + r, end - 1);  // the last strip may repeat the last row
        rows[r] = o.packed + stack * o.packed_stack_stride + n * row_bytes(p.K, kBits);
        for (Index g = 0; g < groups; g += kLanes) {
          const GroupParams params = group_params(p, o, stack, n, g, groups);
          for (int i = 0; i < kLanes; ++i) {
            by_group[(g + i) * 2 * kStrip + r] = params.scale[i];
            by_group[((g + i) * 2 + 1) * kStrip + r] = params.offset[i];
          }
        }
      }
      for (Index i = 0; i < kStrip * p.M; ++i) acc[i] = 0;
      for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes) {
        const Index count = min_of(kPanelCodes, p.K - k0);
        unpack(p, rows, k0, panel);
        scale(p, k0, count, by_group, panel);
        for (Index m = 0, tile; m < p.M; m += tile) {
          tile = tile_rows(p, m);
          multiply(tile, panel, x + m * p.K + k0 * tile, count, acc + m * kStrip);
        }
      }
      for (Index r = 0; r < kStrip && n0 + r < end; ++r) {
        const float bias = bias_of(o, stack, n0 + r);
        for (Index m = 0; m < p.M; ++m)
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n0 + r, acc[m * kStrip + r] + bias);
      }
    }
  }
};

}  // namespace
}  // namespace jaxgemv
