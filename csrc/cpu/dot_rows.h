// Few rows of x: in which order rows of the weight are taken (in int8_dot.h too), and the main loop of f32_dot.h,
// bf16_dot.h and int8_x_dot.h. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "common/epilogue.h"
#include "common/params.h"

namespace jaxgemv::cpu {
namespace {

// Sums in registers at once: rows of the weight times rows of x.
constexpr int kSumsAtOnce = 4;
// The most rows of x. (4 were 1.4 to 1.7 times as slow as panels: docs/cpu-notes.md.)
constexpr int kDotRows = 2;
// The rows in registers at once are far apart: each is in a stream of its own, which reads up to a quarter of
// the task in the order of memory. So many bytes of each are prefetched. (On a Xeon with AMX
// 0.67 ms, for 0.88 with neighbouring rows and 0.74 with a quarter of the distance:
// docs/cpu-notes.md.)
constexpr int kAhead = 1024;

// kCount rows of the weight at a time, each the i-th of a stream.
template <int kCount>
struct RowsAt {
  Index i;
  Index n[kCount], left[kCount];  // numbers of rows; rows of their streams from there on
  const uint8_t* codes[kCount];
};

// Computes rows [begin, end) of y: product(at, y) gives y[row of `at`, a RowsAt][row of x], before the epilogue.
template <int kXRows, typename F>
inline void for_each_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                          Index begin, Index end, F&& product) {
  constexpr int kCount = kSumsAtOnce / kXRows;
  const Epilogue epilogue = {p, o, slice, stack};
  // With a gated activation, half of the rows are partners of the others.
  const int streams = is_gated(p.activation) ? kCount / 2 : kCount;
  const Index step = ceil_div(end - begin, Index{streams});
  float sums[kCount][kXRows][kLanes] = {};
  for (Index i = 0; i < step; ++i) {
    RowsAt<kCount> at;
    at.i = i;
    for (int r = 0; r < kCount; ++r) {
      // The last stream may repeat the last row.
      const Index n = min_of(begin + i + r % streams * step, end - 1);
      at.n[r] = n + (r < streams ? 0 : p.N / 2), at.left[r] = min_of(step - i, end - n);
      at.codes[r] = row_of(p, o, stack, at.n[r]);
    }
    float y[kCount][kXRows];
    product(at, y);
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

// Scales and offsets of a strip, which is neighbouring rows of the weight. They are read together: those of one row
// hardly fill a vector, and took as long as 512 codes (docs/cpu-notes.md, "Short rows"). kMost: scales that stay in
// the first-level cache.
template <typename C, int kMost>
struct StripParams {
  static constexpr Index kMostRows = 16;
  static_assert(kMostRows % kLanes == 0);

  const Problem& p;
  const Operands& o;
  const Index stack;
  const Index groups = groups_of(p), rows = rows_of(p);  // of a row; of a strip
  const Index to_offsets = offsets_at(p);                // from a row's scales to its offsets
  const Index whole =
      groups / kLanes * kLanes;  // groups in whole vectors; lanes of those in the last
  const Ints tail = lane_numbers() < static_cast<int32_t>(groups % kLanes);

  // Rows of a strip, a power of two.
  static Index rows_of(const Problem& p) {
    Index rows = kMostRows;
    while (rows > 1 && rows * groups_of(p) > kMost) rows /= 2;
    return rows;
  }
  // Floats.
  static Index size(const Problem& p) { return (C::kShifted ? 2 : 1) * offsets_at(p); }

  // to[row][group] <- scales of `count` rows from n on, and their offsets. Prefetches those of the next strip.
  void read(Index n, Index count, float* to) const {
    if constexpr (C::kShifted)
      read_params<C>(p, o, stack, n, count, groups, to, to + to_offsets);
    else
      read_groups(o.scale, stack, n, count, groups, to);
    ask_for(o.scale, n + rows), ask_for(o.shift, n + rows);
  }

  // Returns `sum` plus lanes that add up to what a row's offsets contribute. scales: of this row. x_sums: the sums
  // of a row of x, [group], zero behind the last.
  Floats add_shift(Floats sum, const float* scales, const float* x_sums) const {
    if constexpr (C::kShifted) {
      const float* const offsets = scales + to_offsets;
      for (Index g = 0; g < whole; g += kLanes)
        sum += load_floats(offsets + g) * load_floats(x_sums + g);
      if (whole < groups)
        sum += (Floats)(load_ints(offsets + whole) & tail) * load_floats(x_sums + whole);
    }
    return sum;
  }

 private:
  // With a vector more, since lookups read behind the last value.
  static Index offsets_at(const Problem& p) { return padded(rows_of(p) * groups_of(p)) + kLanes; }

  // Prefetches a parameter of the strip that begins with row n.
  void ask_for(const Param& param, Index n) const {
    const Index size = size_of(param.dtype), bytes = rows * param.n_stride * size;
    const char* from = static_cast<const char*>(param.data) +
                       (stack * param.stack_stride + n * param.n_stride) * size;
    for (Index i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  }
};

// Parameters of the rows that for_each_rows meets: a strip of each stream.
template <typename C, int kCount>
class RowParams {
 public:
  // Floats.
  static Index scratch_size(const Problem& p) { return kCount * Strip::size(p); }

  RowParams(const Problem& p, const Operands& o, Index stack, float* scratch)
      : strip_{p, o, stack}, size_(Strip::size(p)), first_(scratch) {}

  void move_to(const RowsAt<kCount>& at) {
    const Index inside = at.i & (strip_.rows - 1);
    scales_ = first_ + inside * strip_.groups;
    if (inside > 0) return;
    for (int r = 0; r < kCount; ++r)
      strip_.read(at.n[r], min_of(strip_.rows, at.left[r]), first_ + r * size_);
  }

  // Scales of the first of the rows; those of each other one are scales_size() further on.
  const float* scales() const { return scales_; }
  Index scales_size() const { return size_; }
  // Lanes that add up to what the offsets of row r contribute.
  Floats shift(int r, const float* x_sums) const {
    return strip_.add_shift(Floats{}, scales_ + r * size_, x_sums);
  }

 private:
  using Strip = StripParams<C, 512>;
  const Strip strip_;
  const Index size_;
  float* const first_;
  const float* scales_ = nullptr;
};

// For each lane of a block of kCodes codes: its group, counted from the block's first.
template <int kCodes>
inline Ints groups_of_lanes(const Problem& p) {
  int32_t group[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    group[lane] = static_cast<int32_t>(lane * kCodes / kLanes / p.group);
  return load_ints(group);
}

// Whether groups are whole blocks of `codes` codes, or parts of one that are whole lanes, or all of K.
inline bool suits_blocks(Index group, Index k, Index codes) {
  return group >= k || group % codes == 0 || (codes % group == 0 && group % (codes / kLanes) == 0);
}

// How blocks are summed before they are scaled.
struct Runs {
  Index blocks, groups;            // blocks of a row; groups to move on by
  Index group_size;                // after so many blocks
  Index whole_blocks, last_words;  // whole blocks of a row; words behind them

  template <typename Main>
  static Runs of(const Problem& p) {
    Runs runs;
    const bool is_narrow = p.group < Main::kCodes && p.group < p.K;
    runs.blocks = ceil_div(p.K, Index{Main::kCodes});
    runs.groups = is_narrow ? Main::kCodes / p.group : 1;
    runs.group_size = is_narrow ? 1 : p.group >= p.K ? runs.blocks : p.group / Main::kCodes;
    runs.whole_blocks = p.K / Main::kCodes;
    runs.last_words = (row_bytes(p.K, p.bits) - runs.whole_blocks * Main::kBytes) / 4;
    return runs;
  }
};

// total[r][m]: lanes that add up to dot(weights of row r, row m of x). Main has
//   kCodes, kBytes of a block, and kVectors, the vectors of x that a block needs for a row of x;
//   Sum; load_block(from, words); add(codes, block, x, sums): for all rows of x;
//   kMaxRun: the most blocks that are summed before they are scaled;
//   add_scaled(total, sum, scale, lanes), where lanes is the block's part of `of_lanes`.
// scales: of row 0; those of the next row are scales_size further on. kFixed: blocks of every run, if not 0.
// kByLane: lanes of a block have scales of their own.
template <typename Main, bool kByLane, int kFixed, int kXRows, int kCount, typename Total>
inline void add_runs(const typename Main::C& codes, const Runs& runs, const float* x,
                     const uint8_t* const (&rows)[kCount], const float* scales, Index scales_size,
                     Ints group_of_lane, const float* of_lanes, Total (&total)[kCount][kXRows]) {
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
    while (block < end) add(runs.last_words);  // the last, where it is not whole
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) {
      const float* scale = scales + r * scales_size;
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
