// Many rows of x by AMX, which multiplies 16 x 32 bfloat16 by 32 x 16 at once and sums in float32.
// Beside kernel.h, and under its rule: internal linkage.
//
// Codes are bfloat16 as they are, and so is x: float16 in two parts, each of which is a column of
// the product as a row of bfloat16 is. Sums over the codes of a group are scaled afterwards, so
// that no product is rounded. (float32 would take three parts, and more time than panel.h.)
//
// A block is a vector of weights, 32 words of 16 bits. Step s takes code s of every word; x is put
// in the same order beforehand.
#pragma once

#include "amx.h"
#include "kernel.h"

namespace jaxgemv {
namespace {

// Elements of x beyond these powers of two, whose parts or sums might not be float32, are left to
// other kernels.
constexpr int kMostExponent = 100;

// Fewer rows are faster as digits (tile_digits.h).
constexpr int kLeastRows = 12;

constexpr int parts_of(Dtype x) { return x == Dtype::kBF16 ? 1 : 2; }

template <int kBits>
struct Tiles {
  static constexpr bool kExists = 4 % kBits == 0;
  static constexpr int kSteps = 16 / kBits, kCodes = kTileWords * kSteps;
  static constexpr Index kBytes = 2 * kTileWords;

  // Blocks are multiplied once for each group in them, so that narrow ones take long.
  static bool accepts(const Problem& p) {
    return p.x != Dtype::kF32 && p.M >= kLeastRows && p.group >= min_of(kCodes / 4, p.K);
  }

  struct Shape {
    Index blocks, groups, parts;
    Index tiles;  // of columns
    int columns;  // in each

    explicit Shape(const Problem& p) {
      blocks = ceil_div(p.K, Index{kCodes}), groups = groups_of(p), parts = parts_of(p.x);
      tiles = ceil_div(p.M * parts, Index{16});
      columns = static_cast<int>(ceil_div(p.M * parts, tiles));
    }
    // The last group of a block. Its first is that of its first code.
    Index last_group(const Problem& p, Index block) const {
      return (min_of((block + 1) * kCodes, p.K) - 1) / p.group;
    }
  };

  struct Arranged {
    float* sums;      // [block, group in it][tile][lane]: of the columns
    uint16_t* parts;  // [block][tile][step][pair of words][column][2]
    Index size;       // in floats

    Arranged(const Problem& p, float* at) {
      const Shape shape(p);
      const Index size_of_sums = (shape.blocks + shape.groups) * shape.tiles * kLanes;
      sums = at, parts = reinterpret_cast<uint16_t*>(at + size_of_sums);
      size = size_of_sums + shape.blocks * shape.tiles * tile_size(shape) / 2;
    }
    static Index tile_size(const Shape& shape) { return kSteps * kTileWords * shape.columns; }
  };

  static Index arranged_size(const Problem& p) { return Arranged(p, nullptr).size; }

  static void prepare(const Problem&, float*) {}

  // False where an element is out of range. What belongs to no row is left as it is.
  static bool arrange(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                      float* out) {
    const Shape shape(p);
    const Arranged a(p, out);
    float* sums = a.sums;
    for (Index block = 0; block < shape.blocks; ++block) {
      const Index k0 = block * kCodes, count = min_of(kCodes, p.K - k0);
      const Index first = k0 / p.group, groups = shape.last_group(p, block) - first + 1;
      for (Index m = m0; m < m1; ++m) {
        float rest[kCodes] = {}, part[kCodes];
        read_floats(p.x, o.x, (slice * p.M + m) * p.K + k0, count, rest);
        if (!in_range(rest)) return false;
        for (Index i = 0; i < shape.parts; ++i) {
          for (int k = 0; k < kCodes; ++k) {
            part[k] = f32_of_bits(bits_of_f32(rest[k]) & 0xffff0000);
            rest[k] -= part[k];
          }
          const Index column = m * shape.parts + i, tile = column / shape.columns;
          const Index lane = column % shape.columns;
          for (Index g = 0; g < groups; ++g)
            sums[(g * shape.tiles + tile) * kLanes + lane] =
                sum_between(part, (first + g) * p.group - k0, (first + g + 1) * p.group - k0);
          put(part, shape.columns,
              a.parts + (block * shape.tiles + tile) * Arranged::tile_size(shape) + 2 * lane);
        }
      }
      sums += groups * shape.tiles * kLanes;
    }
    return true;
  }

  static bool in_range(const float* x) {
    constexpr uint32_t kLeast = (127 - kMostExponent) << 23, kMost = (127 + kMostExponent) << 23;
    uint32_t bad = 0;
    for (int i = 0; i < kCodes; ++i) {
      const uint32_t magnitude = bits_of_f32(x[i]) & 0x7fffffff;
      bad |= (magnitude != 0) & (magnitude - kLeast > kMost - kLeast);
    }
    return !bad;
  }

  // Of part[begin, end), or as much of it as there is.
  static float sum_between(const float* part, Index begin, Index end) {
    Ints code;
    for (int lane = 0; lane < kLanes; ++lane) code[lane] = lane;
    const int from = static_cast<int>(max_of(begin, 0));
    const int to = static_cast<int>(min_of(end, kCodes));
    Floats sum = {};
    for (int k = 0; k < kCodes; k += kLanes, code += kLanes)
      sum += (Floats)((Ints)load_floats(part + k) & (code >= from) & (code < to));
    return sum_of(sum);
  }

  // One column of a tile.
  static void put(const float* part, int columns, uint16_t* to) {
    for (int step = 0; step < kSteps; ++step, ++part)
      for (int word = 0; word < kTileWords; word += 2, to += 2 * columns) {
        const uint32_t low = bits_of_f32(part[word * kSteps]) >> 16;
        const uint32_t pair = low | bits_of_f32(part[(word + 1) * kSteps]);
        __builtin_memcpy(to, &pair, sizeof(pair));
      }
  }

  // The words whose code in a step is one of [begin, end) of the block.
  static uint32_t words_of(int step, Index begin, Index end) {
    const auto below = [&](Index code) {
      return (uint64_t{1} << ceil_div(max_of(code - step, 0), Index{kSteps})) - 1;
    };
    return static_cast<uint32_t>(below(end) & ~below(begin));
  }

  // weights[step][row][word] <- codes [begin, end) of a block of kStrip rows, and zeros.
  static void unpack(const uint8_t* const* rows, Index offset, Index words, Index begin, Index end,
                     uint16_t* weights) {
    uint16_t table[kTileWords];
    for (int i = 0; i < kTileWords; ++i)
      table[i] = static_cast<uint16_t>(bits_of_f32(static_cast<float>(i % (1 << kBits))) >> 16);
    uint32_t chosen[kSteps];
    for (int step = 0; step < kSteps; ++step) chosen[step] = words_of(step, begin, end);
    for (int r = 0; r < kStrip; ++r) {
      const uint8_t* from = rows[r] + offset;
      const Ints w = words >= kLanes ? load_words(from) : load_words(from, words);
      JAXGEMV_UNROLL
      for (int step = 0; step < kSteps; ++step)
        lookup_words(w, step * kBits, table, chosen[step],
                     weights + (step * kStrip + r) * kTileWords);
    }
  }

  // What is multiplied at once: the codes of a group in a block.
  struct Part {
    Index block, group;
    const float* x_sums;
  };
  static constexpr Index kPartSize = kSteps * kStrip * kTileWords;  // of weights

  // A strip's sums, the sums and weights of two parts, and the parameters.
  static Index scratch_size(const Problem& p) {
    const Shape shape(p);
    return kStrip * (kLanes * (shape.tiles + 2) + 2 * padded(shape.groups)) + kPartSize;
  }

  // acc[tile][row][lane] += two parts, or one if they are the same.
  static void add_parts(const Shape& shape, const Arranged& x, const Part (&part)[2],
                        const uint16_t* weights, const float* scale, const float* offset,
                        float* sums, float* acc) {
    const Index groups = padded(shape.groups), size = Arranged::tile_size(shape);
    const bool is_pair = part[0].x_sums != part[1].x_sums;
    const float *scale0 = scale + part[0].group, *scale1 = scale + part[1].group;
    const float *offset0 = offset + part[0].group, *offset1 = offset + part[1].group;
    for (Index tile = 0; tile < shape.tiles; ++tile, acc += kStrip * kLanes) {
      multiply_tiles<kSteps>(weights, x.parts + (part[0].block * shape.tiles + tile) * size,
                             x.parts + (part[1].block * shape.tiles + tile) * size, shape.columns,
                             sums);
      const Floats x0 = load_floats(part[0].x_sums + tile * kLanes);
      const Floats x1 = load_floats(part[1].x_sums + tile * kLanes);
      for (Index r = 0, g = 0; r < kStrip; ++r, g += groups) {
        float* to = acc + r * kLanes;
        Floats sum = load_floats(to);
        sum += load_floats(sums + r * kLanes) * scale0[g] + x0 * offset0[g];
        if (is_pair) sum += load_floats(sums + (kStrip + r) * kLanes) * scale1[g] + x1 * offset1[g];
        store_floats(to, sum);
      }
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* arranged,
                  Index begin, Index end, float* scratch) {
    const Shape shape(p);
    const Arranged x(p, arranged);
    const Index bytes = row_bytes(p.K, kBits), groups = padded(shape.groups);
    float* acc = scratch;  // [tile][row][lane]
    float* sums = acc + shape.tiles * kStrip * kLanes;
    uint16_t* weights = reinterpret_cast<uint16_t*>(sums + 2 * kStrip * kLanes);
    float* scale = reinterpret_cast<float*>(weights + 2 * kPartSize);  // [row][group]
    float* offset = scale + kStrip * groups;                           // [row][group]
    start_tiles(shape.columns);
    for (Index n0 = begin; n0 < end; n0 += kStrip) {
      const uint8_t* rows[kStrip];
      for (Index r = 0; r < kStrip; ++r) {
        const Index n = min_of(n0 + r, end - 1);  // the last strip may repeat the last row
        rows[r] = o.packed + stack * o.packed_stack_stride + n * bytes;
      }
      load_strip_params(p, o, stack, n0, end - 1, scale, offset, groups);
      for (Index i = 0; i < shape.tiles * kStrip * kLanes; ++i) acc[i] = 0;
      const uint8_t* ahead = rows[0] + kStrip * bytes;
      Part part[2];
      int parts = 0;
      const float* x_sums = x.sums;
      for (Index block = 0; block < shape.blocks; ++block) {
        const Index k0 = block * kCodes, last = shape.last_group(p, block);
        for (int r = 0; r < kStrip; ++r, ahead += kBytes) __builtin_prefetch(ahead, 0, 2);
        for (Index g = k0 / p.group; g <= last; ++g, x_sums += shape.tiles * kLanes) {
          unpack(rows, block * kBytes, bytes / 4 - block * kLanes, g * p.group - k0,
                 min_of((g + 1) * p.group - k0, Index{kCodes}), weights + parts * kPartSize);
          part[parts++] = {block, g, x_sums};
          if (parts == 1 && block + 1 == shape.blocks && g == last) part[parts++] = part[0];
          if (parts == 2) add_parts(shape, x, part, weights, scale, offset, sums, acc), parts = 0;
        }
      }
      for (Index r = 0; r < kStrip && n0 + r < end; ++r) {
        const float bias = bias_of(o, stack, n0 + r);
        for (Index m = 0; m < p.M; ++m) {
          float y = 0;
          for (Index column = m * shape.parts; column < (m + 1) * shape.parts; ++column)
            y += acc[(column / shape.columns * kStrip + r) * kLanes + column % shape.columns];
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n0 + r, y + bias);
        }
      }
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace jaxgemv
