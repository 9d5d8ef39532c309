// Few rows of x where a block of codes holds several groups: rows of the weight are taken one after another, in the
// order of memory, since there is as much to do for a row as for its blocks. Under the rule of
// isa/kernels.h: internal linkage.
//
// The work that is done once a row is done for a strip of rows: 18 groups, say, are no whole vectors, but those
// of 16 rows are; and lanes are summed by a transposition, not row by row.
#pragma once

#include "dot_rows.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
using Strip = StripParams<C, 1024>;

// Bytes by which the codes, a single stream, are prefetched.
constexpr int kStripAhead = 2048;

// Lane i <- the sum of the lanes of v[i].
inline Floats sums_of_each(const Floats* v) {
  Ints square[kLanes];
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; ++i) square[i] = (Ints)v[i];
  transpose(square);
  JAXGEMV_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) JAXGEMV_UNROLL
  for (int i = 0; i < half; ++i) square[i] = (Ints)((Floats)square[i] + (Floats)square[i + half]);
  return (Floats)square[0];
}

// For each lane of a block of kCodes codes: its group, counted from the block's first; where the last block of a
// row has fewer groups, its last one.
template <int kCodes>
struct LaneGroups {
  Ints of_whole, of_last;

  explicit LaneGroups(const Problem& p) {
    const Index last = (p.K - 1) % kCodes / p.group;
    int32_t whole[kLanes], rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Index group = lane * kCodes / kLanes / p.group;
      whole[lane] = static_cast<int32_t>(group);
      rest[lane] = static_cast<int32_t>(min_of(group, last));
    }
    of_whole = load_ints(whole), of_last = load_ints(rest);
  }
};

// Computes rows [begin, end) of y: product(row, scales, total) adds a row of the weight, without its offsets,
// to total[row of x], whose lanes are then summed. scales: of the row's groups, with anything behind them.
// x_sums: [row of x][group], zero behind the last.
template <typename C, int kXRows, typename F>
inline void for_each_strip(const Problem& p, const Operands& o, Index slice, Index stack,
                           Index begin, Index end, const float* x_sums, float* scratch,
                           F&& product) {
  const Epilogue epilogue = {p, o, slice, stack};
  const Strip<C> strip{p, o, stack};
  constexpr Index kMostRows = Strip<C>::kMostRows;
  const Index row_size = row_bytes(p.K, p.bits);
  const int halves = is_gated(p.activation) ? 2 : 1;
  float sums[2][kXRows][kMostRows];
  Floats totals[kXRows][kMostRows] = {};
  for (Index n0 = begin; n0 < end; n0 += strip.rows) {
    const Index count = min_of(strip.rows, end - n0);
    for (int half = 0; half < halves; ++half) {
      const Index n = n0 + half * (p.N / 2);
      strip.read(n, count, scratch);
      const uint8_t* row = row_of(p, o, stack, n);
      const float* scales = scratch;
      for (Index r = 0; r < count; ++r, row += row_size, scales += strip.groups) {
        Floats total[kXRows] = {};
        product(row, scales, total);
        JAXGEMV_UNROLL
        for (int m = 0; m < kXRows; ++m)
          totals[m][r] = strip.add_shift(total[m], scales, x_sums + m * padded(strip.groups));
      }
      for (int m = 0; m < kXRows; ++m)
        for (Index i = 0; i < kMostRows; i += kLanes)
          store_floats(sums[half][m] + i, sums_of_each(totals[m] + i));
    }
    for (int m = 0; m < kXRows; ++m) epilogue.store(m, n0, count, sums[0][m], sums[halves - 1][m]);
  }
}

// total[m] += lanes that add up to dot(row of the weight, row m of x). Main is as for add_runs. kWide: a group
// may be several blocks, and only x has scales that differ between lanes.
template <typename Main, bool kWide, int kXRows>
inline void add_row(const typename Main::C& codes, const Runs& runs, const float* x,
                    const uint8_t* row, const float* scales, const LaneGroups<Main::kCodes>& lanes,
                    const float* of_lanes, Floats (&total)[kXRows]) {
  constexpr Index kWords = Main::kBytes / 4;
  Index in_group = 0;
  const auto add = [&](Index words, Ints group_of_lane) __attribute__((always_inline)) {
    __builtin_prefetch(row + kStripAhead);
    typename Main::Sum sum[kXRows] = {};
    Main::template add<kXRows>(codes, Main::load_block(row, words), x, sum);
    const Floats scale = lookup(load_floats(scales), group_of_lane);
    JAXGEMV_UNROLL
    for (int m = 0; m < kXRows; ++m)
      Main::template add_scaled<true>(total[m], sum[m], scale, of_lanes + m * kLanes);
    row += Main::kBytes, x += kXRows * Main::kVectors * kLanes;
    of_lanes += kXRows * kLanes;
    if (!kWide || ++in_group == runs.group_size) in_group = 0, scales += runs.groups;
  };
  constexpr Index kAtOnce = 4;
  Index block = 0;
  for (; block + kAtOnce <= runs.whole_blocks; block += kAtOnce) JAXGEMV_UNROLL
  for (Index i = 0; i < kAtOnce; ++i) add(kWords, lanes.of_whole);
  for (; block < runs.whole_blocks; ++block) add(kWords, lanes.of_whole);
  if (runs.whole_blocks < runs.blocks) add(runs.last_words, lanes.of_last);
}

}  // namespace
}  // namespace jaxgemv::cpu
