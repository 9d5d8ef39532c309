// Few rows of x: rows of the weight as they meet them, in int8_dot.h too, and the main loop of f32_dot.h
// and int8_x_dot.h. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "common/epilogue.h"
#include "common/params.h"

namespace jaxgemv::cpu {
namespace {

// Rows of weights times rows of x in registers at once.
constexpr int kSumsAtOnce = 4;
// Rows of x. (4 were 1.4 to 1.7 times as slow as panels: docs/cpu-notes.md.)
constexpr int kDotRows = 2;
// Rows in registers at once are far apart, and each is the head of a stream that reads a quarter of
// the task in the order of memory; so many bytes of it are asked for ahead. (On a Xeon with AMX
// 0.67 ms, for 0.88 with neighbouring rows and 0.74 with a quarter of the distance:
// docs/cpu-notes.md.)
constexpr int kAhead = 1024;

// Those of y from [begin, end): product(n, rows, y) of so many rows n of the weight gives y[of these][row
// of x].
template <int kXRows, typename F>
inline void for_each_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                          Index begin, Index end, F&& product) {
  constexpr int kCount = kSumsAtOnce / kXRows;
  const Epilogue epilogue = {p, o, slice, stack};
  // Of a gated activation half of the rows are the others' partners.
  const int streams = is_gated(p.activation) ? kCount / 2 : kCount;
  const Index step = ceil_div(end - begin, Index{streams});
  float sums[kCount][kXRows][kLanes] = {};
  for (Index i = 0; i < step; ++i) {
    const uint8_t* rows[kCount];
    Index n[kCount];
    for (int r = 0; r < kCount; ++r) {
      // The last of them may repeat the last row.
      n[r] = min_of(begin + i + r % streams * step, end - 1) + (r < streams ? 0 : p.N / 2);
      rows[r] = row_of(p, o, stack, n[r]);
    }
    float y[kCount][kXRows];
    product(n, rows, y);
    for (int r = 0; r < kCount; ++r)
      for (int m = 0; m < kXRows; ++m) sums[r][m][i % kLanes] = y[r][m];
    if (i % kLanes < kLanes - 1 && i < step - 1) continue;
    for (int r = 0; r < streams; ++r) {
      const Index first = begin + i / kLanes * kLanes + r * step;
      const Index count = min_of(i % kLanes + 1, end - first);
      for (int m = 0; m < kXRows; ++m)
        epilogue.store(m, first, count, sums[r][m], sums[(r + streams) % kCount][m]);
    }
  }
}

// Which group of those that lie in a block of kCodes codes a lane belongs to.
template <int kCodes>
inline Ints groups_of_lanes(const Problem& p) {
  int32_t group[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    group[lane] = static_cast<int32_t>(lane * kCodes / kLanes / p.group);
  return load_ints(group);
}

// Groups of these are whole blocks of kCodes, or parts of one that are whole lanes, or all of K.
inline bool suits_blocks(Index group, Index k, Index codes) {
  return group >= k || group % codes == 0 || (codes % group == 0 && group % (codes / kLanes) == 0);
}

// How blocks are summed before they are scaled.
struct Runs {
  Index blocks, groups;       // of a row of weights; groups that a block has to move on by
  Index group_size;           // blocks, after which to do so
  Index words, whole_blocks;  // of a row
  Index scales_size;          // from a row's scales to the next's

  template <typename Main>
  static Runs of(const Problem& p) {
    Runs runs;
    const bool is_narrow = p.group < Main::kCodes && p.group < p.K;
    runs.blocks = ceil_div(p.K, Index{Main::kCodes});
    runs.groups = is_narrow ? Main::kCodes / p.group : 1;
    runs.group_size = is_narrow ? 1 : p.group >= p.K ? runs.blocks : p.group / Main::kCodes;
    runs.words = row_bytes(p.K, p.bits) / 4, runs.whole_blocks = runs.words * 4 / Main::kBytes;
    runs.scales_size = padded(groups_of(p)) + kLanes;  // lookups read behind the last
    return runs;
  }
};

// total[r][m]: lanes whose sum is dot(weights of row r, row m of x). Main has
//   kCodes, kBytes, kVectors: of a block, and of its x for a row;
//   Sum; load_block(from, words); add(codes, block, x, sums): all rows of x;
//   kMaxRun: blocks that are summed by themselves;
//   add_scaled(total, sum, scale, lanes), lanes being the block's of `of_lanes`.
// kFixed: blocks of a run, if not 0. kByLane: lanes of a block have scales of their own.
template <typename Main, bool kByLane, int kFixed, int kXRows, int kCount, typename Total>
inline void add_runs(const typename Main::C& codes, const Runs& runs, const float* x,
                     const uint8_t* const (&rows)[kCount], const float* scales, Ints group_of_lane,
                     const float* of_lanes, Total (&total)[kCount][kXRows]) {
  Total acc[kCount][kXRows] = {};
  Index group_end = runs.group_size;
  for (Index block = 0; block < runs.blocks;) {
    const Index end =
        kFixed > 0 ? block + kFixed : min_of(min_of(block + Main::kMaxRun, group_end), runs.blocks);
    typename Main::Sum sum[kCount][kXRows] = {};
    const auto add = [&](Index words) __attribute__((always_inline)) {
      JAXGEMV_UNROLL
      for (int r = 0; r < kCount; ++r) {
        const uint8_t* from = rows[r] + block * Main::kBytes;
        if (block % max_of(1, 64 / Main::kBytes) == 0) __builtin_prefetch(from + kAhead);
        Main::template add<kXRows>(codes, Main::load_block(from, words), x, sum[r]);
      }
      ++block, x += kXRows * Main::kVectors * kLanes;
    };
    constexpr Index kWords = Main::kBytes / 4;
    if constexpr (kFixed > 0) {
      if (end <= runs.whole_blocks) {
        JAXGEMV_UNROLL
        for (int i = 0; i < kFixed; ++i) add(kWords);
      }
    } else {
      for (const Index whole_end = min_of(end, runs.whole_blocks); block < whole_end;) add(kWords);
    }
    while (block < end) add(runs.words % kWords);  // the last, and less than a whole one
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) {
      const float* scale = scales + r * runs.scales_size;
      const Floats by = kByLane ? lookup(load_floats(scale), group_of_lane) : broadcast(*scale);
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m)
        Main::template add_scaled<kByLane>(acc[r][m], sum[r][m], by, of_lanes + m * kLanes);
    }
    of_lanes += kXRows * kLanes;
    if (block == group_end) group_end += runs.group_size, scales += runs.groups;
  }
  JAXGEMV_UNROLL
  for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
  for (int m = 0; m < kXRows; ++m) total[r][m] = acc[r][m];
}

}  // namespace
}  // namespace jaxgemv::cpu
