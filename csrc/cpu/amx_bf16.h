// Many rows of x by AMX, whose tile product multiplies 16 x 32 bfloat16 by 32 x 16 and sums in float32.
// Under the rule of isa/kernels.h: internal linkage.
//
// Integer codes and float8 are exact in bfloat16; entries of a codebook may be the sum of two bfloat16, and float16 x
// is always split so. A row of x is one column of the product for each of its parts. Sums over the codes of a group
// are scaled afterwards, so that no product is rounded. (float32, and so x with a norm, would take three parts, and
// more time than f32_panel.h.)
//
// A block is one vector of a row of weights, 32 words of 16 bits. Step s takes code s of every word; x is
// packed in the same order beforehand.
#pragma once

#include "common/codes.h"
#include "common/epilogue.h"
#include "common/params.h"
#include "common/x.h"
#include "isa/amx.h"

namespace jaxgemv::cpu {
namespace {

constexpr int parts_of(Dtype x) { return x == Dtype::kBF16 ? 1 : 2; }

template <typename C>
struct AmxBf16 {
  static constexpr const char* kName = "amx_bf16";
  static constexpr int kRows = kSharingRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kF16 || x == Dtype::kBF16; }
  static constexpr int kBits = C::kBits, kSteps = C::kSteps, kCodes = kTileWords * kSteps;
  static constexpr Index kBytes = 2 * kTileWords;

  // A block is multiplied once for each group in it, so that narrow groups would take long.
  static bool supports(const Problem& p, const Operands& o) {
    return p.group >= min_of(kCodes / 4, p.K) && C::suits(p, o);
  }

  struct Shape {
    Index blocks, groups, parts;
    Index tiles;  // of columns: a row of x in one of its parts
    int columns;  // in each

    explicit Shape(const Problem& p) {
      blocks = ceil_div(p.K, Index{kCodes}), groups = groups_of(p), parts = parts_of(p.x);
      tiles = ceil_div(p.M * parts, Index{16});
      columns = static_cast<int>(ceil_div(p.M * parts, tiles));
    }
    // The last group in a block. The first is the group of its first code.
    Index last_group(const Problem& p, Index block) const {
      return (min_of((block + 1) * kCodes, p.K) - 1) / p.group;
    }
  };

  struct Packed {
    float* sums;      // [block, group in it][tile][lane]: of x
    uint16_t* parts;  // [block][tile][step][pair of words][column][2]
    Index size;       // in floats

    Packed(const Problem& p, float* at) {
      const Shape shape(p);
      const Index size_of_sums = (shape.blocks + shape.groups) * shape.tiles * kLanes;
      sums = at, parts = reinterpret_cast<uint16_t*>(at + size_of_sums);
      size = size_of_sums + shape.blocks * shape.tiles * tile_size(shape) / 2;
    }
    static Index tile_size(const Shape& shape) { return kSteps * kTileWords * shape.columns; }
  };

  static Index x_size(const Problem& p, const Operands&) { return Packed(p, nullptr).size; }
  static void prepare(const Problem&, const Operands&, float*) {}

  // False if an element of x is out of range. Lanes without a row of x are left as they are.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Shape shape(p);
    const Packed to(p, out);
    float* sums = to.sums;
    for (Index block = 0; block < shape.blocks; ++block) {
      const Index k0 = block * kCodes, count = min_of(kCodes, p.K - k0);
      const Index first = k0 / p.group, groups = shape.last_group(p, block) - first + 1;
      for (Index m = m0; m < m1; ++m) {
        float rest[kCodes] = {}, part[kCodes];
        x.read(m, k0, count, rest);
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
              to.parts + (block * shape.tiles + tile) * Packed::tile_size(shape) + 2 * lane);
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

  // The sum of part[begin, end), clipped to the block.
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

  // Stores one part of a row of x as a column of a tile.
  static void put(const float* part, int columns, uint16_t* to) {
    for (int step = 0; step < kSteps; ++step, ++part)
      for (int word = 0; word < kTileWords; word += 2, to += 2 * columns) {
        const uint32_t low = bits_of_f32(part[word * kSteps]) >> 16;
        const uint32_t pair = low | bits_of_f32(part[(word + 1) * kSteps]);
        __builtin_memcpy(to, &pair, sizeof(pair));
      }
  }

  // A mask of the words whose code number `step` lies in [begin, end) of the block.
  static uint32_t words_of(int step, Index begin, Index end) {
    const auto below = [&](Index code) {
      return (uint64_t{1} << ceil_div(max_of(code - step, 0), Index{kSteps})) - 1;
    };
    return static_cast<uint32_t>(below(end) & ~below(begin));
  }

  // weights[step][row][word] <- codes [begin, end) of a block of kRowBlock rows, and zeros elsewhere. ahead: a block
  // to be prefetched.
  template <typename Table>
  static void unpack(const Table& table, const uint8_t* const* rows, Index offset, Index words,
                     Index begin, Index end, const uint8_t* ahead, uint16_t* weights) {
    uint32_t chosen[kSteps];
    for (int step = 0; step < kSteps; ++step) chosen[step] = words_of(step, begin, end);
    for (int r = 0; r < kRowBlock; ++r) {
      ahead = prefetch(ahead, kBytes);
      const uint8_t* from = rows[r] + offset;
      const Ints w = words >= kLanes ? load_words(from) : load_words(from, words);
      JAXGEMV_UNROLL
      for (int step = 0; step < kSteps; ++step)
        lookup_words(w, step * kBits, table, chosen[step],
                     weights + (step * kRowBlock + r) * kTileWords);
    }
  }

  // The unit of multiplication: the codes of one group in one block.
  struct Part {
    Index block, group;
    const float* x_sums;
    int place;  // which half of the unpacked weights
  };
  static constexpr Index kPartSize = kSteps * kRowBlock * kTileWords;  // of weights

  // Floats for a row block's sums, the sums and weights of two parts, and the parameters.
  static Index scratch_size(const Problem& p, const Operands&) {
    const Shape shape(p);
    return kRowBlock * (kLanes * (shape.tiles + 2) + 2 * padded(shape.groups)) + kPartSize;
  }

  // acc[tile][row][lane] += two parts, or one if both are the same. (Two parts of the same codes, in a codebook with
  // a rest, have no offset.)
  static void add_parts(const Shape& shape, const Packed& x, const Part (&part)[2],
                        const uint16_t* weights, const float* scale, const float* offset,
                        float* sums, float* acc) {
    const Index groups = padded(shape.groups), size = Packed::tile_size(shape);
    const bool is_pair = part[0].place != part[1].place;
    const float *scale0 = scale + part[0].group, *scale1 = scale + part[1].group;
    const float *offset0 = offset + part[0].group, *offset1 = offset + part[1].group;
    for (Index tile = 0; tile < shape.tiles; ++tile, acc += kRowBlock * kLanes) {
      multiply_tiles<kSteps>(weights, x.parts + (part[0].block * shape.tiles + tile) * size,
                             x.parts + (part[1].block * shape.tiles + tile) * size, shape.columns,
                             sums);
      const Floats x0 = load_floats(part[0].x_sums + tile * kLanes);
      const Floats x1 = load_floats(part[1].x_sums + tile * kLanes);
      for (Index r = 0, g = 0; r < kRowBlock; ++r, g += groups) {
        float* to = acc + r * kLanes;
        Floats sum = load_floats(to);
        sum += load_floats(sums + r * kLanes) * scale0[g] + x0 * offset0[g];
        if (is_pair)
          sum += load_floats(sums + (kRowBlock + r) * kLanes) * scale1[g] + x1 * offset1[g];
        store_floats(to, sum);
      }
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* packed,
                  Index begin, Index end, float* scratch) {
    const C codes(p, o, stack);
    const Epilogue epilogue = {p, o, slice, stack};
    const Shape shape(p);
    const Packed x(p, packed);
    const Index bytes = row_bytes(p.K, kBits), groups = padded(shape.groups);
    float* acc = scratch;  // [tile][row][lane]
    float* sums = acc + shape.tiles * kRowBlock * kLanes;
    uint16_t* weights = reinterpret_cast<uint16_t*>(sums + 2 * kRowBlock * kLanes);
    float* scale = reinterpret_cast<float*>(weights + 2 * kPartSize);  // [row][group]
    float* offset = scale + kRowBlock * groups;                        // [row][group]
    start_tiles(shape.columns);
    for (Index n0 = begin; n0 < end; n0 += RowBlock::rows(p)) {
      const RowBlock rows(p, n0, end);
      const uint8_t* at[kRowBlock];
      rows.point_at(p, o, stack, at);
      load_params_by_row<C>(p, o, stack, rows, scale, offset, groups);
      for (Index i = 0; i < shape.tiles * kRowBlock * kLanes; ++i) acc[i] = 0;
      Part part[2];
      int parts = 0;
      const float* x_sums = x.sums;
      for (Index block = 0; block < shape.blocks; ++block) {
        const Index k0 = block * kCodes, last = shape.last_group(p, block);
        const uint8_t* ahead = rows.next(at, block * kRowBlock * kBytes, bytes);
        for (Index g = k0 / p.group; g <= last; ++g, x_sums += shape.tiles * kLanes) {
          const auto add = [&](const auto& table, bool is_last) {
            unpack(table, at, block * kBytes, bytes / 4 - block * kLanes, g * p.group - k0,
                   min_of((g + 1) * p.group - k0, Index{kCodes}), ahead,
                   weights + parts * kPartSize);
            part[parts] = {block, g, x_sums, parts};
            if (++parts == 1 && is_last) part[parts++] = part[0];
            if (parts == 2) add_parts(shape, x, part, weights, scale, offset, sums, acc), parts = 0;
          };
          const bool is_last = block + 1 == shape.blocks && g == last;
          add(codes.table, is_last && !codes.has_rest);
          if (codes.has_rest) add(codes.rest, is_last);
        }
      }
      for (Index m = 0; m < p.M; ++m) {
        float y[kRowBlock] = {};
        for (Index column = m * shape.parts; column < (m + 1) * shape.parts; ++column) {
          const Index tile = column / shape.columns, lane = column % shape.columns;
          for (Index r = 0; r < kRowBlock; ++r) y[r] += acc[(tile * kRowBlock + r) * kLanes + lane];
        }
        epilogue.store(m, n0, rows.count, y, y + kRowBlock / 2);
      }
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
