// Products by AMX, which multiplies 16 x 64 unsigned bytes by 64 x 16 signed ones at once and sums
// in 32 bits. Beside kernel.h, and under its rule: internal linkage.
//
// As in digits.h x becomes fixed point, by a power of two for each run of codes, and is cut into
// digits, signed bytes. Here a digit of a row of x is a column of the product. Its sums are exact,
// and become float32 once a run.
//
// Weights are hardly unpacked, since storing them would take the time that memory leaves. Of a byte
// b with codes c[0], c[1], .. from its lowest bit on, AMX is given the remainders
// r[s] = b % 2^((s + 1) kBits), of which the last is b itself, where it lies in memory. With
// c[s] = (r[s] - r[s - 1]) / 2^(s kBits), what x[s] is to c[s],
// z[s] = x[s] / 2^(s kBits) - x[s + 1] / 2^((s + 1) kBits) is to r[s].
#pragma once

#include "amx.h"
#include "kernel.h"

namespace jaxgemv {
namespace {

// Bytes of a row that are asked for ahead. (More streams than the hardware follows: 256 and more
// are slower, on a Xeon with AMX.)
constexpr int kTileAhead = 128;

template <int kBits>
struct TileDigits {
  static constexpr bool kExists = 8 % kBits == 0;
  static constexpr int kSteps = 8 / kBits;
  static constexpr int kCodes = kTileBytes * kSteps;  // in a block, kTileBytes bytes of a row
  // Blocks whose sums are float32 exactly, and whose elements of x are not too different.
  static constexpr int kMaxRun = 512 / kCodes;
  static constexpr int kMaxDigits = 8;
  // Powers of two of the largest element of a run. Of others, what digits are worth might not be
  // float32.
  static constexpr int kLeastExponent = -60, kMostExponent = 90;

  // Blocks are multiplied once for each group in them, so that narrow ones take long.
  static bool accepts(const Problem& p) { return p.M > 1 && p.group >= min_of(kCodes / 4, p.K); }

  // Many where they only fill a tile of columns.
  static int digits_of(const Problem& p) {
    return p.x != Dtype::kF32 ? 5 : p.M * kMaxDigits <= 16 ? kMaxDigits : 6;
  }

  // Codes of one group in blocks [block, end), which may be of other groups too.
  struct Run {
    int32_t block, end, group;
  };

  // How digits lie in tiles of columns: [row][digit], where a tile has all rows of its row tile and
  // some digits of each, or all digits, and then sums of several runs lie side by side.
  struct Shape {
    Index bytes, blocks, groups, parts;  // parts: at least as many as groups in blocks
    int digits, row_tiles, rows, tiles, sub, columns, sides;
    Index slots;  // blocks unpacked at a time

    explicit Shape(const Problem& p) {
      bytes = row_bytes(p.K, kBits), blocks = ceil_div(p.K, Index{kCodes}), groups = groups_of(p);
      parts = p.group >= p.K || p.group % kCodes == 0 ? blocks : blocks + groups;
      digits = digits_of(p);
      row_tiles = static_cast<int>(ceil_div(p.M, Index{16}));
      rows = static_cast<int>(ceil_div(p.M, Index{row_tiles}));
      tiles = (digits + min_of(digits, 16 / rows) - 1) / min_of(digits, 16 / rows);
      sub = (digits + tiles - 1) / tiles;
      columns = rows * sub;
      sides = tiles * row_tiles == 1 ? 16 / columns : 1;
      slots = 2 * min_of(min_of(kMaxRun, blocks), ceil_div(p.group, Index{kCodes}) + 1);
    }
    // Of x, in bytes.
    Index tile_size() const { return kTileBytes * columns; }
  };

  // x as the kernel reads it. What lies side by side is a vector of sums.
  struct Arranged {
    int32_t* count;  // of runs
    Run* runs;
    float* vectors;   // [vector of runs]: places(), then worth() and sums() of each row tile
    uint8_t* digits;  // [run][row tile][tile][part of the run][step][4 codes][column][code]
    Index vector_size, size;

    Arranged(const Shape& s, float* at) {
      vector_size = (1 + 2 * s.row_tiles) * kLanes;
      count = reinterpret_cast<int32_t*>(at);
      runs = reinterpret_cast<Run*>(at + kLanes);
      vectors = at + kLanes + padded(3 * s.parts);
      float* end = vectors + ceil_div(s.parts, Index{s.sides}) * vector_size;
      digits = reinterpret_cast<uint8_t*>(end);
      size = end - at + s.parts * s.row_tiles * s.tiles * kSteps * s.tile_size() / 4;
    }
    // Which group of those from the first one's on a lane belongs to.
    int32_t* places(Index vector) const {
      return reinterpret_cast<int32_t*>(vectors + vector * vector_size);
    }
    // What a unit of a lane is worth.
    float* worth(Index vector, Index row_tile) const {
      return vectors + vector * vector_size + (1 + 2 * row_tile) * kLanes;
    }
    // Of x, in one of the lanes of a row.
    float* sums(Index vector, Index row_tile) const { return worth(vector, row_tile) + kLanes; }
  };

  static Index arranged_size(const Problem& p) { return Arranged(Shape(p), nullptr).size; }

  // How many runs there are, and which.
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

  // All but what belongs to a row of x, and zeros where there is no such row.
  static void prepare(const Problem& p, float* out) {
    const Shape s(p);
    const Arranged a(s, out);
    float* end = out + a.size;
    if (s.rows * s.row_tiles == p.M && s.sub * s.tiles == s.digits)
      end = reinterpret_cast<float*>(a.digits);
    while (out < end) *out++ = 0;
    *a.count = static_cast<int32_t>(divide(p, s, a.runs));
    for (Index i = 0; i < *a.count; ++i)
      for (int lane = 0; lane < s.columns; ++lane)
        a.places(i / s.sides)[i % s.sides * s.columns + lane] =
            a.runs[i].group - a.runs[i / s.sides * s.sides].group;
  }

  // False where an element would be too far off.
  static bool arrange(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                      float* out) {
    const Shape s(p);
    const Arranged a(s, out);
    uint8_t* digits = a.digits;
    for (Index i = 0; i < *a.count; ++i) {
      const Run run = a.runs[i];
      const Index k0 = run.block * Index{kCodes}, parts = run.end - run.block, q = i / s.sides;
      const Index begin = max_of(k0, run.group * p.group);
      const Index end = min_of(min_of(run.end * Index{kCodes}, (run.group + 1) * p.group), p.K);
      const int side = static_cast<int>(i % s.sides) * s.columns;
      Index places[kMaxDigits];
      for (int d = 0; d < s.digits; ++d)
        places[d] = d / s.sub * parts * kSteps * s.tile_size() + d % s.sub * 4;
      for (Index m = m0; m < m1; ++m) {
        const Index row_tile = m / s.rows;
        const int column = static_cast<int>(m % s.rows) * s.sub;
        float natural[kMaxRun * kCodes], unit;
        for (Index k = 0; k < parts * kCodes; ++k) natural[k] = 0;
        read_floats(p.x, o.x, (slice * p.M + m) * p.K + begin, end - begin, natural + begin - k0);
        int64_t fixed[kMaxRun * kCodes];
        if (!fix(natural, parts * kCodes, s.digits, fixed, &unit)) return false;
        Floats sum = {};
        for (Index k = 0; k < parts * kCodes; k += kLanes) sum += load_floats(natural + k);
        a.sums(q, row_tile)[side + column] = sum_of(sum);
        for (int d = 0; d < s.sub; ++d, unit *= 256) a.worth(q, row_tile)[side + column + d] = unit;
        for (Index part = 0; part < parts; ++part)
          for (int step = 0; step < kSteps; ++step) {
            uint8_t* to = digits + 4 * column +
                          (row_tile * s.tiles * parts + part) * kSteps * s.tile_size() +
                          step * s.tile_size();
            cut(fixed + part * kCodes, step, s, places, to);
          }
      }
      digits += parts * s.row_tiles * s.tiles * kSteps * s.tile_size();
    }
    return true;
  }

  // x in units of a power of two, that of r[s] for all s.
  static bool fix(const float* x, Index count, int digits, int64_t* fixed, float* unit) {
    uint32_t largest = 0;
    for (Index i = 0; i < count; ++i) {
      const uint32_t magnitude = bits_of_f32(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    const int exponent = largest == 0 ? 0 : static_cast<int>(largest >> 23) - 127;
    if (exponent < kLeastExponent || exponent > kMostExponent) return false;
    // z (see `cut`) is x shifted left by up to 8 - kBits, minus at most half as much, so below
    // 1.5 * 2^(bits + 8 - kBits), and the digits hold |z| < 2^(8 digits - 1): so many bits are
    // left for x.
    const int bits = 8 * digits - 2 - (8 - kBits), power = exponent + 1 - bits;
    const float inverse = f32_of_bits(static_cast<uint32_t>(127 - power) << 23);
    *unit = f32_of_bits(static_cast<uint32_t>(127 + power - (8 - kBits)) << 23);
    int32_t bad = 0;
    for (Index i = 0; i < count; ++i) {
      const float value = x[i] * inverse;
      // Below one half, so that no sum is rounded up to the next integer.
      fixed[i] = static_cast<int64_t>(value + __builtin_copysignf(0x1.fffffep-2f, value));
      bad |= __builtin_fabsf(value - static_cast<float>(fixed[i])) >
             kFixedError * __builtin_fabsf(value);
      bad |= (value == 0) != (x[i] == 0);
    }
    return !bad;
  }

  // The digits of one step of a block, of one row. places: of digits in the bytes of a column's
  // first four codes.
  static void cut(const int64_t* fixed, int step, const Shape& s, const Index* places,
                  uint8_t* to) {
    const int shift = 8 - kBits - kBits * step;
    for (int k = 0; k < kTileBytes; k += 8, to += 8 * s.columns) {
      int64_t z[8];
      for (int i = 0; i < 8; ++i) {
        const int64_t* x = fixed + (k + i) * kSteps + step;
        z[i] = x[0] << shift;
        if (step + 1 < kSteps) z[i] -= x[1] << (shift - kBits);
      }
      uint32_t words[2][kMaxDigits];
      digits_of_eight(z, words);
      for (int d = 0; d < s.digits; ++d) {
        __builtin_memcpy(to + places[d], &words[0][d], 4);
        __builtin_memcpy(to + places[d] + 4 * s.columns, &words[1][d], 4);
      }
    }
  }

  // Of a task.
  struct Scratch {
    float* acc;             // [row tile][row of the strip][lane]
    float *scale, *offset;  // [row of the strip][group], a vector more than there are
    int32_t* sums;          // [tile][row of the strip][lane]
    uint8_t* codes;         // [slot][step][row of the strip][byte]
    Index groups, size;

    Scratch(const Shape& s, float* at) {
      groups = padded(s.groups) + kLanes;
      acc = at;
      scale = acc + s.row_tiles * kStrip * kLanes;
      offset = scale + kStrip * groups;
      sums = reinterpret_cast<int32_t*>(offset + kStrip * groups);
      codes = reinterpret_cast<uint8_t*>(sums + s.tiles * kStrip * kLanes);
      size = offset - at + kStrip * (groups + s.tiles * kLanes + s.slots * kSteps * kLanes);
    }
    uint8_t* codes_of(const Shape& s, Index block, int step) const {
      return codes + (block % s.slots * kSteps + step) * kStrip * kTileBytes;
    }
  };

  static Index scratch_size(const Problem& p) { return Scratch(Shape(p), nullptr).size; }

  // A strip of rows of weights.
  struct Strip {
    const uint8_t* rows[kStrip];
    bool is_whole;
  };

  // All remainders of a block but the last, if that can be read where it is.
  static void unpack(const Shape& s, Index block, Strip& strip, const Scratch& scratch) {
    const Index words = s.bytes / 4 - block * kLanes;
    const bool is_whole = words >= kLanes, is_copied = !is_whole || !strip.is_whole;
    uint8_t* to = scratch.codes_of(s, block, 0);
    for (int r = 0; r < kStrip; ++r, to += kTileBytes) {
      __builtin_prefetch(strip.rows[r] + block * kTileBytes + kTileAhead, 0, 2);
      const uint8_t* from = strip.rows[r] + block * kTileBytes;
      if (kSteps == 1 && !is_copied) continue;
      const Ints w = is_whole ? load_words(from) : load_words(from, words);
      JAXGEMV_UNROLL
      for (int step = 0; step + 1 < kSteps; ++step) {
        constexpr uint32_t kBytes = 0x01010101;
        const Ints remainder = w & static_cast<int32_t>(kBytes * ((1u << (step + 1) * kBits) - 1));
        store_floats(reinterpret_cast<float*>(to + step * kStrip * kTileBytes), (Floats)remainder);
      }
      if (is_copied)
        store_floats(reinterpret_cast<float*>(to + (kSteps - 1) * kStrip * kTileBytes), (Floats)w);
    }
  }

  // Where the remainders of a run are. How many there are.
  static Index find(const Shape& s, const Run& run, const Strip& strip, const Scratch& scratch,
                    TileRows (&weights)[kMaxRun * kSteps]) {
    Index count = 0;
    for (Index block = run.block; block < run.end; ++block)
      for (int step = 0; step < kSteps; ++step)
        weights[count++] =
            step + 1 == kSteps && strip.is_whole && (block + 1) * kTileBytes <= s.bytes
                ? TileRows{strip.rows[0] + block * kTileBytes, s.bytes}
                : TileRows{scratch.codes_of(s, block, step), kTileBytes};
    return count;
  }

  // acc += what the sums of a vector of runs are worth.
  static void add(const Shape& s, const Arranged& x, Index vector, Index row_tile,
                  const Scratch& scratch) {
    const Floats worth = load_floats(x.worth(vector, row_tile));
    const Floats x_sums = load_floats(x.sums(vector, row_tile));
    const Ints places = load_ints(x.places(vector));
    const Index group = x.runs[vector * s.sides].group;
    const float *scale = scratch.scale + group, *offset = scratch.offset + group;
    float* acc = scratch.acc + row_tile * kStrip * kLanes;
    constexpr Index kTile = kStrip * kLanes;
    const float next = s.sub == kMaxDigits ? 0 : static_cast<float>(uint64_t{1} << (8 * s.sub));
    const int32_t* sums = scratch.sums + (s.tiles - 1) * kTile;
    for (int r = 0; r < kStrip; ++r, sums += kLanes, acc += kLanes) {
      Floats value = to_floats(load_ints(sums));
      for (int tile = 1; tile < s.tiles; ++tile)
        value = value * next + to_floats(load_ints(sums - tile * kTile));
      const Floats scales = lookup(load_floats(scale), places);
      const Floats offsets = lookup(load_floats(offset), places);
      store_floats(acc, load_floats(acc) + value * worth * scales + x_sums * offsets);
      scale += scratch.groups, offset += scratch.groups;
    }
  }

  // y[slice, :, n:end], or kStrip of these rows.
  static void write(const Problem& p, const Operands& o, const Shape& s, Index slice, Index stack,
                    Index n0, Index end, const float* acc) {
    for (Index n = n0; n < min_of(n0 + kStrip, end); n += kLanes) {
      const Index count = min_of(kLanes, end - n);
      float bias[kLanes] = {}, values[kLanes];
      for (Index r = 0; r < count; ++r) bias[r] = bias_of(o, stack, n + r);
      for (Index row_tile = 0, m = 0; row_tile < s.row_tiles; ++row_tile) {
        const float* from = acc + (row_tile * kStrip + n - n0) * kLanes;
        Ints lane[kLanes];
        for (int r = 0; r < kLanes; ++r) lane[r] = load_ints(from + r * kLanes);
        transpose(lane);
        for (int column = 0; column < s.columns && m < p.M; column += s.sub, ++m) {
          Floats sum = load_floats(bias);
          for (int side = column; side < s.sides * s.columns; side += s.columns)
            for (int d = 0; d < s.sub; ++d) sum += (Floats)lane[side + d];
          store_floats(values, sum);
          write_floats(p.y, o.y, (slice * p.M + m) * p.N + n, count, values);
        }
      }
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* arranged,
                  Index begin, Index end, float* scratch_memory) {
    const Shape s(p);
    const Arranged x(s, arranged);
    const Scratch scratch(s, scratch_memory);
    const Index runs = *x.count;
    start_tiles(s.columns);
    for (Index n0 = begin; n0 < end; n0 += kStrip) {
      Strip strip;
      strip.is_whole = n0 + kStrip <= end;
      for (Index r = 0; r < kStrip; ++r) {
        const Index n = min_of(n0 + r, end - 1);  // the last strip may repeat the last row
        strip.rows[r] = o.packed + stack * o.packed_stack_stride + n * s.bytes;
      }
      load_strip_params(p, o, stack, n0, end - 1, scratch.scale, scratch.offset, scratch.groups);
      for (Index i = 0; i < s.row_tiles * kStrip * kLanes; ++i) scratch.acc[i] = 0;
      const uint8_t* digits = x.digits;
      Index ready = 0;  // blocks
      for (Index i = 0; i < runs; ++i) {
        // One run ahead: what is stored here cannot be loaded at once.
        for (const Index last = x.runs[min_of(i + 1, runs - 1)].end; ready < last; ++ready)
          unpack(s, ready, strip, scratch);
        TileRows weights[kMaxRun * kSteps];
        const Index count = find(s, x.runs[i], strip, scratch, weights);
        const int side = static_cast<int>(i % s.sides) * s.columns;
        for (Index row_tile = 0; row_tile < s.row_tiles; ++row_tile) {
          for (int tile = 0; tile < s.tiles; tile += 2) {
            int32_t* sums = scratch.sums + tile * kStrip * kLanes + side;
            const bool is_pair = tile + 1 < s.tiles;
            multiply_tiles(weights, count, digits, s.columns, is_pair, sums);
            digits += (1 + is_pair) * count * s.tile_size();
          }
          if (i % s.sides == s.sides - 1 || i == runs - 1)
            add(s, x, i / s.sides, row_tile, scratch);
        }
      }
      write(p, o, s, slice, stack, n0, end, scratch.acc);
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace jaxgemv
