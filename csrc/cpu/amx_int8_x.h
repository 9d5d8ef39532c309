// x for amx_int8.h: fixed-point numbers, cut into slices of signed bytes that are columns of the product. Under
// the rule of isa/kernels.h: internal linkage.
#pragma once

#include "common/codes.h"
#include "common/fixed_point.h"
#include "common/params.h"
#include "common/x.h"
#include "isa/amx.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
struct TileSlicedX {
  static constexpr int kBits = C::kBits, kSteps = C::kSteps;
  static constexpr int kCodes = kTileBytes * kSteps;  // in a block, kTileBytes bytes of a row
  static constexpr int kMaxRun = kRunCodes / kCodes;  // blocks, whose sums are float32 exactly
  static constexpr int kMaxSlices = 8;
  // Limits on the exponent of a run's largest element. Outside of them, what a slice is worth might be no
  // float32.
  static constexpr int kLeastExponent = -60, kMostExponent = 90;

  // Slices of an element of x. The most where all of them fit into one tile of 16 columns.
  static int tile_slices_of(const Problem& p, const Operands& o) {
    return !is_float_x(p, o) ? 5 : p.M * kMaxSlices <= 16 ? kMaxSlices : 6;
  }

  // The codes of one group in blocks [block, end); these may hold codes of other groups too.
  struct Run {
    int32_t block, end, group;
  };

  // How slices lie in tiles of up to 16 columns, as [row of x][slice]. A tile has all rows of its x tile and some
  // slices of each; if a single tile has them all, the sums of several runs lie side by side.
  struct Shape {
    Index bytes, blocks, groups, parts;  // parts: at least as many as groups in blocks
    int slices, x_tiles, rows, tiles, sub, columns, sides;
    Index slots;  // blocks unpacked at a time

    Shape(const Problem& p, const Operands& o) {
      bytes = row_bytes(p.K, kBits), blocks = ceil_div(p.K, Index{kCodes}), groups = groups_of(p);
      parts = p.group >= p.K || p.group % kCodes == 0 ? blocks : blocks + groups;
      slices = tile_slices_of(p, o);
      x_tiles = static_cast<int>(ceil_div(p.M, Index{16}));
      rows = static_cast<int>(ceil_div(p.M, Index{x_tiles}));
      tiles = (slices + min_of(slices, 16 / rows) - 1) / min_of(slices, 16 / rows);
      sub = (slices + tiles - 1) / tiles;
      columns = rows * sub;
      sides = tiles * x_tiles == 1 ? 16 / columns : 1;
      slots = 2 * min_of(min_of(kMaxRun, blocks), ceil_div(p.group, Index{kCodes}) + 1);
    }
    // Bytes of x in a tile.
    Index tile_size() const { return kTileBytes * columns; }
  };

  // The packed x. Runs whose sums lie side by side share a vector.
  struct Packed {
    int32_t* count;  // number of runs
    Run* runs;
    float*
        vectors;  // [vector of runs]: places(), then quanta() and sums() of each tile of rows of x
    uint8_t* slices;  // [run][x tile][tile][part of the run][step][4 codes][column][code]
    Index vector_size, size;

    Packed(const Shape& s, float* at) {
      vector_size = (1 + 2 * s.x_tiles) * kLanes;
      count = reinterpret_cast<int32_t*>(at);
      runs = reinterpret_cast<Run*>(at + kLanes);
      vectors = at + kLanes + padded(3 * s.parts);
      float* end = vectors + ceil_div(s.parts, Index{s.sides}) * vector_size;
      slices = reinterpret_cast<uint8_t*>(end);
      size = end - at + s.parts * s.x_tiles * s.tiles * kSteps * s.tile_size() / 4;
    }
    // For each lane: its group, counted from the group of the vector's first run.
    int32_t* places(Index vector) const {
      return reinterpret_cast<int32_t*>(vectors + vector * vector_size);
    }
    // For each lane: the quantum of its slice.
    float* quanta(Index vector, Index x_tile) const {
      return vectors + vector * vector_size + (1 + 2 * x_tile) * kLanes;
    }
    // Sums of x over a run, each in the lane of its row's first slice.
    float* sums(Index vector, Index x_tile) const { return quanta(vector, x_tile) + kLanes; }
  };

  static Index divide(const Problem& p, const Shape& s, Run* runs) {
    Index count = 0;
    for (Index g = 0; g < s.groups; ++g) {
      const Index last = ceil_div(min_of((g + 1) * p.group, p.K), Index{kCodes});
      for (Index block = g * p.group / kCodes; block < last; block += kMaxRun)
        runs[count++] = {static_cast<int32_t>(block),
                         static_cast<int32_t>(min_of(block + kMaxRun, last)),
                         static_cast<int32_t>(g)};
    }
    return count;
  }

  static Index x_size(const Problem& p, const Operands& o) {
    return Packed(Shape(p, o), nullptr).size;
  }

  // Writes everything that no row of x owns, and zeros for rows and slices that are not there.
  static void prepare(const Problem& p, const Operands& o, float* out) {
    const Shape s(p, o);
    const Packed to(s, out);
    float* end = out + to.size;
    if (s.rows * s.x_tiles == p.M && s.sub * s.tiles == s.slices)
      end = reinterpret_cast<float*>(to.slices);
    while (out < end) *out++ = 0;
    *to.count = static_cast<int32_t>(divide(p, s, to.runs));
    for (Index i = 0; i < *to.count; ++i)
      for (int lane = 0; lane < s.columns; ++lane)
        to.places(i / s.sides)[i % s.sides * s.columns + lane] =
            to.runs[i].group - to.runs[i / s.sides * s.sides].group;
  }

  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Shape s(p, x.o);
    const Packed to(s, out);
    uint8_t* slices = to.slices;
    for (Index i = 0; i < *to.count; ++i) {
      const Run run = to.runs[i];
      const Index k0 = run.block * Index{kCodes}, parts = run.end - run.block, q = i / s.sides;
      const Index begin = max_of(k0, run.group * p.group);
      const Index end = min_of(min_of(run.end * Index{kCodes}, (run.group + 1) * p.group), p.K);
      const int side = static_cast<int>(i % s.sides) * s.columns;
      Index places[kMaxSlices];
      for (int d = 0; d < s.slices; ++d)
        places[d] = d / s.sub * parts * kSteps * s.tile_size() + d % s.sub * 4;
      for (Index m = m0; m < m1; ++m) {
        const Index x_tile = m / s.rows;
        const int column = static_cast<int>(m % s.rows) * s.sub;
        float natural[kMaxRun * kCodes], quantum;
        for (Index k = 0; k < parts * kCodes; ++k) natural[k] = 0;
        x.read(m, begin, end - begin, natural + begin - k0);
        int64_t fixed[kMaxRun * kCodes];
        if (!fix(natural, parts * kCodes, s.slices, fixed, &quantum)) return false;
        Floats sum = {};
        for (Index k = 0; k < parts * kCodes; k += kLanes) sum += load_floats(natural + k);
        to.sums(q, x_tile)[side + column] = sum_of(sum);
        for (int d = 0; d < s.sub; ++d, quantum *= 256)
          to.quanta(q, x_tile)[side + column + d] = quantum;
        for (Index part = 0; part < parts; ++part)
          for (int step = 0; step < kSteps; ++step) {
            uint8_t* tile = slices + 4 * column +
                            (x_tile * s.tiles * parts + part) * kSteps * s.tile_size() +
                            step * s.tile_size();
            cut(fixed + part * kCodes, step, s, places, tile);
          }
      }
      slices += parts * s.x_tiles * s.tiles * kSteps * s.tile_size();
    }
    return true;
  }

  // fixed <- x as fixed point; quantum <- what 1 is worth in the numbers z[step] that C::x_at makes of it. False if x
  // does not suit.
  static bool fix(const float* x, Index count, int slices, int64_t* fixed, float* quantum) {
    const uint32_t largest = largest_magnitude(x, count);
    const int exponent = largest == 0 ? 0 : static_cast<int>(largest >> 23) - 127;
    if (exponent < kLeastExponent || exponent > kMostExponent) return false;
    // z is x shifted left by up to kShift, minus at most half as much, so below
    // 1.5 * 2^(bits + kShift), and the slices hold |z| < 2^(8 slices - 1): so many bits are left
    // for x.
    const int bits = 8 * slices - 2 - C::kShift, power = exponent + 1 - bits;
    const float inverse = f32_of_bits(static_cast<uint32_t>(127 - power) << 23);
    *quantum = f32_of_bits(static_cast<uint32_t>(127 + power - C::kShift) << 23);
    int32_t bad = 0;
    for (Index i = 0; i < count; ++i) {
      const float value = x[i] * inverse;
      fixed[i] = nearest<int64_t>(value);
      bad |= is_off(x[i], value, value - static_cast<float>(fixed[i]));
    }
    return !bad;
  }

  // Stores the slices of one row of x for one step of a block. places: how many bytes each slice lies behind
  // the row's first one.
  static void cut(const int64_t* fixed, int step, const Shape& s, const Index* places,
                  uint8_t* to) {
    for (int k = 0; k < kTileBytes; k += 8, to += 8 * s.columns) {
      int64_t z[8];
      for (int i = 0; i < 8; ++i) z[i] = C::x_at(fixed + (k + i) * kSteps, step);
      uint32_t words[2][kMaxSlices];
      slices_of_eight(z, words);
      for (int d = 0; d < s.slices; ++d) {
        __builtin_memcpy(to + places[d], &words[0][d], 4);
        __builtin_memcpy(to + places[d] + 4 * s.columns, &words[1][d], 4);
      }
    }
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
