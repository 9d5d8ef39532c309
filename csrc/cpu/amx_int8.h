// Products by AMX, whose tile product multiplies 16 x 64 unsigned bytes by 64 x 16 signed ones and sums
// in 32 bits. Under the rule of isa/kernels.h: internal linkage.
//
// As in int8_dot.h, x becomes fixed point, with a quantum for each run of codes, and is cut into
// slices of signed bytes. Here each slice of a row of x is a column of the product. Its sums are exact,
// and become float32 once a run.
//
// Weights are hardly unpacked, since storing them would take the time that waiting for memory leaves. Codes turns
// a byte into remainders (common/codes.h), of which the last is the byte itself, used where it lies.
#pragma once

#include "amx_int8_x.h"
#include "common/epilogue.h"

namespace jaxgemv::cpu {
namespace {

// How many bytes ahead each row is prefetched. (The rows are more streams than the hardware prefetcher
// follows; 256 and more are slower, on a Xeon with AMX.)
constexpr int kTileAhead = 128;

template <typename C>
struct AmxInt8 : TileSlicedX<C> {
  static constexpr const char* kName = "amx_int8";
  static constexpr int kRows = kSharingRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype x) { return is_wide(x); }
  using XPacked = TileSlicedX<C>;
  using Shape = typename XPacked::Shape;
  using Packed = typename XPacked::Packed;
  using Run = typename XPacked::Run;
  static constexpr int kSteps = C::kSteps, kMaxRun = XPacked::kMaxRun;
  static constexpr int kMaxSlices = XPacked::kMaxSlices;

  // A block is multiplied once for each group in it, so that narrow groups would take long.
  static bool supports(const Problem& p, const Operands&) {
    return p.group >= min_of(XPacked::kCodes / 4, p.K);
  }

  // The scratch memory of a task.
  struct Scratch {
    float* acc;             // [x tile][row of the block][lane]
    float *scale, *offset;  // [row of the block][group], a vector more than there are
    int32_t* sums;          // [tile][row of the block][lane]
    uint8_t* codes;         // [slot][step][row of the block][byte]
    Index groups, size;

    Scratch(const Shape& s, float* at) {
      groups = padded(s.groups) + kLanes;
      acc = at;
      scale = acc + s.x_tiles * kRowBlock * kLanes;
      offset = scale + kRowBlock * groups;
      sums = reinterpret_cast<int32_t*>(offset + kRowBlock * groups);
      codes = reinterpret_cast<uint8_t*>(sums + s.tiles * kRowBlock * kLanes);
      size = offset - at + kRowBlock * (groups + s.tiles * kLanes + s.slots * kSteps * kLanes);
    }
    uint8_t* codes_of(const Shape& s, Index block, int step) const {
      return codes + (block % s.slots * kSteps + step) * kRowBlock * kTileBytes;
    }
  };

  static Index scratch_size(const Problem& p, const Operands& o) {
    return Scratch(Shape(p, o), nullptr).size;
  }

  struct Rows {
    const uint8_t* at[kRowBlock];
    bool is_whole;  // rows are evenly spaced in both halves
  };

  // Stores the remainders of a block (common/codes.h): all but the last, and that too if it cannot be read in place.
  static void unpack(const C& codes, const Shape& s, Index block, const Rows& rows,
                     const Scratch& scratch) {
    const Index words = s.bytes / 4 - block * kLanes;
    const bool is_whole = words >= kLanes, is_copied = !is_whole || !rows.is_whole;
    uint8_t* to = scratch.codes_of(s, block, 0);
    for (int r = 0; r < kRowBlock; ++r, to += kTileBytes) {
      __builtin_prefetch(rows.at[r] + block * kTileBytes + kTileAhead, 0, 2);
      const uint8_t* from = rows.at[r] + block * kTileBytes;
      if (kSteps == 1 && !is_copied) continue;
      const Ints w = is_whole ? load_words(from) : load_words(from, words);
      JAXGEMV_UNROLL
      for (int step = 0; step + 1 < kSteps; ++step) {
        const Ints remainder = codes.at(w, step);
        store_floats(reinterpret_cast<float*>(to + step * kRowBlock * kTileBytes),
                     (Floats)remainder);
      }
      if (is_copied)
        store_floats(reinterpret_cast<float*>(to + (kSteps - 1) * kRowBlock * kTileBytes),
                     (Floats)w);
    }
  }

  // weights <- where each remainder of a run lies, in memory or in scratch. Returns their number.
  static Index find(const Shape& s, const Run& run, const Rows& rows, const Scratch& scratch,
                    TileRows (&weights)[kMaxRun * kSteps]) {
    Index count = 0;
    for (Index block = run.block; block < run.end; ++block)
      for (int step = 0; step < kSteps; ++step)
        weights[count++] =
            step + 1 == kSteps && rows.is_whole && (block + 1) * kTileBytes <= s.bytes
                ? TileRows(rows.at[0] + block * kTileBytes,
                           rows.at[kTileHeight] + block * kTileBytes, s.bytes)
                : TileRows(scratch.codes_of(s, block, step));
    return count;
  }

  // acc += the integer sums of one vector of runs, scaled by quanta and scales, plus sums of x times offsets.
  static void add(const Shape& s, const Packed& x, Index vector, Index x_tile,
                  const Scratch& scratch) {
    const Floats quanta = load_floats(x.quanta(vector, x_tile));
    const Floats x_sums = load_floats(x.sums(vector, x_tile));
    const Ints places = load_ints(x.places(vector));
    const Index group = x.runs[vector * s.sides].group;
    const float *scale = scratch.scale + group, *offset = scratch.offset + group;
    float* acc = scratch.acc + x_tile * kRowBlock * kLanes;
    constexpr Index kTile = kRowBlock * kLanes;
    const float next = s.sub == kMaxSlices ? 0 : static_cast<float>(uint64_t{1} << (8 * s.sub));
    const int32_t* sums = scratch.sums + (s.tiles - 1) * kTile;
    for (int r = 0; r < kRowBlock; ++r, sums += kLanes, acc += kLanes) {
      Floats value = to_floats(load_ints(sums));
      for (int tile = 1; tile < s.tiles; ++tile)
        value = value * next + to_floats(load_ints(sums - tile * kTile));
      const Floats scales = lookup(load_floats(scale), places);
      const Floats offsets = lookup(load_floats(offset), places);
      store_floats(acc, load_floats(acc) + value * quanta * scales + x_sums * offsets);
      scale += scratch.groups, offset += scratch.groups;
    }
  }

  // Adds up the lanes of each row of x, and writes a row block's values of y.
  static void write(const Epilogue& epilogue, const Shape& s, const RowBlock& block,
                    const float* acc) {
    for (Index x_tile = 0, first = 0; x_tile < s.x_tiles; ++x_tile, first += s.rows) {
      float y[16][kRowBlock];  // [row of x]
      const Index rows = min_of(s.rows, epilogue.p.M - first);
      for (int r0 = 0; r0 < kRowBlock; r0 += kLanes) {
        Ints lane[kLanes];
        for (int r = 0; r < kLanes; ++r, acc += kLanes) lane[r] = load_ints(acc);
        transpose(lane);
        for (Index m = 0; m < rows; ++m) {
          Floats sum = {};
          for (Index side = m * s.sub; side < s.sides * s.columns; side += s.columns)
            for (Index i = 0; i < s.sub; ++i) sum += (Floats)lane[side + i];
          store_floats(y[m] + r0, sum);
        }
      }
      for (Index m = 0; m < rows; ++m)
        epilogue.store(first + m, block.n0, block.count, y[m], y[m] + kRowBlock / 2);
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* packed,
                  Index begin, Index end, float* scratch_memory) {
    const C codes(p, o, stack);
    const Epilogue epilogue = {p, o, slice, stack};
    const Shape s(p, o);
    const Packed x(s, packed);
    const Scratch scratch(s, scratch_memory);
    const Index runs = *x.count;
    start_tiles(s.columns);
    for (Index n0 = begin; n0 < end; n0 += RowBlock::rows(p)) {
      const RowBlock block(p, n0, end);
      Rows rows;
      block.point_at(p, o, stack, rows.at);
      rows.is_whole = block.is_whole();
      load_params_by_row<C>(p, o, stack, block, scratch.scale, scratch.offset, scratch.groups);
      for (Index i = 0; i < s.x_tiles * kRowBlock * kLanes; ++i) scratch.acc[i] = 0;
      const uint8_t* slices = x.slices;
      Index ready = 0;  // blocks
      for (Index i = 0; i < runs; ++i) {
        // Unpacked one run ahead, because what has just been stored cannot be loaded into a tile at once.
        for (const Index last = x.runs[min_of(i + 1, runs - 1)].end; ready < last; ++ready)
          unpack(codes, s, ready, rows, scratch);
        TileRows weights[kMaxRun * kSteps];
        const Index count = find(s, x.runs[i], rows, scratch, weights);
        const int side = static_cast<int>(i % s.sides) * s.columns;
        for (Index x_tile = 0; x_tile < s.x_tiles; ++x_tile) {
          for (int tile = 0; tile < s.tiles; tile += 2) {
            int32_t* sums = scratch.sums + tile * kRowBlock * kLanes + side;
            const bool is_pair = tile + 1 < s.tiles;
            multiply_tiles(weights, count, slices, s.columns, is_pair, sums);
            slices += (1 + is_pair) * count * s.tile_size();
          }
          if (i % s.sides == s.sides - 1 || i == runs - 1) add(s, x, i / s.sides, x_tile, scratch);
        }
      }
      write(epilogue, s, block, scratch.acc);
    }
    _tile_release();
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
