// Rows of the weight as few rows of x meet them, in int8_dot.h and f32_dot.h. Under the rule of
// isa/kernels.h: internal linkage.
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

}  // namespace
}  // namespace jaxgemv::cpu
