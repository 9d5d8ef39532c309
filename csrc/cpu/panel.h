// Kernels that decode weights into a panel, which is then multiplied with many rows of x: what f32_panel.h,
// bf16_panel.h and int8_panel.h share. Under the rule of isa/kernels.h: internal linkage.
//
// A lane holds a row of the weight: words of kLanes rows are transposed, after which code k has the same
// place in every lane. A panel, kPanelCodes codes of kRowBlock rows, is decoded once and multiplied
// with up to kSharingRows rows of x while the first-level cache holds it.
#pragma once

#include <utility>

#include "common/codes.h"
#include "common/epilogue.h"
#include "common/params.h"
#include "common/x.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kPanelCodes = 128;
constexpr int kChunkCodes = 32;  // these are as many words as a code has bits
static_assert(kRowBlock % (kTileVectors * kLanes) == 0);

// The code that begins with bit kBit of a chunk's words (kBits of them, in registers): its lowest bit becomes
// bit kTo of a lane, with anything around it.
template <int kBits, int kBit, int kTo = 0>
inline Ints code_at(const Ints (&word)[kBits]) {
  constexpr int kAt = kBit / 32, kShift = kBit % 32 - kTo, kHere = 32 - kBit % 32;
  Ints code = word[kAt];
  if constexpr (kShift > 0) code >>= kShift;
  if constexpr (kShift < 0) code <<= -kShift;
  if constexpr (kHere < kBits) {
    constexpr int32_t kLow = ((1 << kHere) - 1) << kTo;
    code = (code & kLow) | word[kAt + 1] << (kHere + kTo);
  }
  return code;
}

// Calls f<rows>() for 1 to kRows rows, a number that is known only at run time.
template <int kRows = kTileRows, typename F>
inline void with_rows(Index rows, F&& f) {
  if constexpr (kRows > 1)
    if (rows < kRows) return with_rows<kRows - 1>(rows, f);
  f.template operator()<kRows>();
}

// Calls f(first, end) for a few rows of x at a time: packing these one panel after another reads and writes a few
// streams, rather than a page for each row.
template <typename F>
inline void for_each_stripe(Index m0, Index m1, F&& f) {
  constexpr Index kStripe = 8;
  for (Index m = m0; m < m1; m += kStripe) f(m, min_of(m + kStripe, m1));
}

// Unpacks codes [k0, k0 + kPanelCodes) of kRowBlock rows: calls put(words, chunk, lane) for each chunk of kChunkCodes
// and each kLanes rows, from row `lane` on; words[i] has word i of the chunk of one row a lane. Anything behind K.
template <int kBits, typename Put>
inline void unpack_panel(const Problem& p, const uint8_t* const* rows, Index k0, Put&& put) {
  constexpr int kWords = kPanelCodes / kChunkCodes * kBits;
  const Index first = k0 / kChunkCodes * kBits, left = row_bytes(p.K, kBits) / 4 - first;
  for (int lane = 0; lane < kRowBlock; lane += kLanes, rows += kLanes) {
    Ints word[ceil_div(kWords, kLanes) * kLanes + 1];
    for (int w = 0; w < kWords; w += kLanes) {
      Ints square[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const uint8_t* from = rows[j] + (first + w) * 4;
        square[j] = left - w >= kLanes ? load_words(from) : load_words(from, max_of(0, left - w));
      }
      transpose(square);
      for (int j = 0; j < kLanes; ++j) word[w + j] = square[j];
    }
    for (int chunk = 0; chunk < kPanelCodes / kChunkCodes; ++chunk)
      put(word + chunk * kBits, chunk, lane);
  }
}

// Where a panel's x lies, and how far it is from a row to the next, and from a panel to the next; in floats.
struct XRows {
  const float* at;
  Index row, panel;
};

// Form: what a panel holds and how it is multiplied. It has
//   kPanelSteps: vectors of a panel for one row of x: codes of a row, or words of several;
//   make_plan(p, plan), once a task: what depends on shapes alone, in plan_size(p) of scratch;
//   unpack_chunk(codes, words, s, k0, chunk, lane): kChunkCodes codes of the panel that begins at k0;
//   rows_of(p, o, slice, packed): x of the first panel;
//   multiply(p, s, k0, m0, m1, x): adds the products of rows [m0, m1) to s.acc; x moves on to the next panel.
template <typename C, typename Form>
struct Panel {
  static constexpr int kRows = kSharingRows;
  static constexpr int kBits = C::kBits;
  static constexpr int kWords = kPanelCodes / kChunkCodes * kBits;

  static Index panels_of(const Problem& p) { return ceil_div(p.K, Index{kPanelCodes}); }

  // The scratch memory of a task.
  struct Scratch {
    float* acc;       // [row of x][lane]
    float* panel;     // [code or pair of them][lane]
    float* by_group;  // [group][scale, offset][lane]
    float* by_row;    // [row of kLanes][scale, offset][group]
    float* plan;
    Index size;

    Scratch(const Problem& p, float* at) {
      acc = at;
      panel = acc + min_of(p.M, kSharingRows) * kRowBlock;
      by_group = panel + Form::kPanelSteps * kRowBlock;
      by_row = by_group + padded(groups_of(p)) * 2 * kRowBlock;
      plan = by_row + padded(groups_of(p)) * 2 * kLanes;
      size = plan - at + Form::plan_size(p);
    }
  };

  static Index scratch_size(const Problem& p, const Operands&) { return Scratch(p, nullptr).size; }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const Scratch s(p, scratch);
    Form::make_plan(p, s.plan);
    const Index shares = ceil_div(p.M, Index{kSharingRows});
    for (Index share = 0; share < shares; ++share)
      run_rows(p, o, slice, stack, x, begin, end, s, p.M * share / shares,
               p.M * (share + 1) / shares);
  }

  // Rows [m0, m1) of x.
  static void run_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                       const float* x, Index begin, Index end, const Scratch& s, Index m0,
                       Index m1) {
    const C codes(p, o, stack);
    const Epilogue epilogue = {p, o, slice, stack};
    const Index bytes = row_bytes(p.K, kBits);
    for (Index n0 = begin; n0 < end; n0 += RowBlock::rows(p)) {
      const RowBlock block(p, n0, end);
      const uint8_t* rows[kRowBlock];
      block.point_at(p, o, stack, rows);
      load_params_by_group<C>(p, o, stack, block, s.by_row, s.by_group);
      for (Index i = 0; i < kRowBlock * (m1 - m0); ++i) s.acc[i] = 0;
      XRows next_x = Form::rows_of(p, o, slice, x);
      for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes) {
        // The next row block is prefetched, in the order of memory.
        constexpr Index kPanelBytes = kRowBlock * kWords * 4;
        const uint8_t* ahead = block.next(rows, k0 / kPanelCodes * kPanelBytes, bytes);
        unpack_panel<kBits>(p, rows, k0, [&](const Ints* words, int chunk, int lane) {
          ahead = prefetch(ahead, kPanelBytes * kChunkCodes * kLanes / (kPanelCodes * kRowBlock));
          Form::unpack_chunk(codes, words, s, k0, chunk, lane);
        });
        Form::multiply(p, s, k0, m0, m1, next_x);
      }
      for (Index m = m0; m < m1; ++m) {
        const float* sums = s.acc + (m - m0) * kRowBlock;
        epilogue.store(m, n0, block.count, sums, sums + kRowBlock / 2);
      }
    }
  }

  // Calls tile<rows>(m, lane) for all lanes of a panel, and rows [m0, m1) of x in tiles of about equal heights.
  template <typename Tile>
  static void for_each_tile(Index m0, Index m1, Tile&& tile) {
    const Index tiles = ceil_div(m1 - m0, Index{kTileRows});
    for (Index i = 0, m = m0, next; i < tiles; ++i, m = next) {
      next = m0 + (m1 - m0) * (i + 1) / tiles;
      with_rows(next - m, [&]<int kTall>() {
        for (int lane = 0; lane < kRowBlock; lane += kTileVectors * kLanes)
          tile.template operator()<kTall>(m, lane);
      });
    }
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
