// The threads of the wgmma_tma kernel that do not multiply: they ask for copies, and barriers tell when these have
// arrived.
#pragma once

#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Barriers in shared memory, full and empty: for each stage of x, and for each slot (of a box) of all groups.
template <typename S>
struct Barriers {
  static constexpr int kX = S::kXStages, kSlots = S::kGroups * S::kSlots,
                       kCount = 2 * (kX + kSlots) + 3;
  uint32_t first;

  __device__ __forceinline__ uint32_t x_full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return first + 8 * (kX + stage); }
  __device__ __forceinline__ uint32_t full(int slot) const { return first + 8 * (2 * kX + slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return first + 8 * (2 * kX + kSlots + slot);
  }
  __device__ __forceinline__ uint32_t rows_full() const {  // of RowOfX, what is known of rows of x
    return first + 8 * 2 * (kX + kSlots);
  }
  __device__ __forceinline__ uint32_t sent() const { return rows_full() + 8; }  // see gather
  // Nobody waits for it.
  __device__ __forceinline__ uint32_t spare() const { return rows_full() + 16; }
  // Each is called by a thread of another warp, since lanes of one would take turns. The thread that copies weights
  // makes the barriers that it uses itself.
  __device__ __forceinline__ void init_of_weights() const {
    for (int i = 0; i < kSlots; ++i) init_barrier(full(i), 1), init_barrier(empty(i), 4);
    init_barrier(rows_full(), 1);
    fence_barrier_init();
  }
  // warps: how many use a stage of x.
  __device__ __forceinline__ void init_of_x(int warps) const {
    for (int i = 0; i < kX; ++i) init_barrier(x_full(i), 1), init_barrier(x_empty(i), warps);
    init_barrier(sent(), 1), init_barrier(spare(), 1);
    fence_barrier_init();
  }
};

// Which of a CTA's units of K each group takes, where groups of warps share K: in turns of one unit, or of kMostTurn
// (by_fours), so that each group loads only scales that it needs.
template <typename S>
struct Turns {
  static constexpr int kFour = S::kMostTurn;
  int deep, log_deep, each;

  __device__ __forceinline__ Turns(const Params& params, bool by_fours)
      : deep(params.deep), log_deep(params.log_deep()), each(by_fours ? kFour : 1) {}

  __device__ __forceinline__ int first(int share) const { return share * each; }
  __device__ __forceinline__ int behind(int unit) const {
    if (kFour == 1) return unit + deep;
    const bool ends = (unit & (kFour - 1)) == kFour - 1;
    return unit + (each == 1 ? deep : ends ? (deep - 1) * kFour + 1 : 1);
  }
  // The CTA's i-th unit, which group i % deep of those that share K takes.
  __device__ __forceinline__ int at(int i) const {
    if (kFour == 1 || each == 1) return i;
    const int turn = i >> log_deep;
    return ((turn & ~(kFour - 1)) << log_deep) + first(i & (deep - 1)) + (turn & (kFour - 1));
  }
};

// Whether a group of four warps has rows of the weights: the last of four may have none.
__device__ __forceinline__ bool has_rows(const Params& params, int group) {
  return (group >> params.log_deep()) * 4 < params.across;
}

// Copies the boxes of all groups, in one thread, which has to be quick: they use one up each 300 ns. Each group's
// second box waits for the first record of x: at rows_full, which has one phase only, since the stages of x do not wait
// for this thread, which may sleep through two phases.
template <typename S>
__device__ __forceinline__ void copy_weights(const Params& params, const Share& own, int tile,
                                             int units, const CUtensorMap& weights, int box_rows,
                                             Turns<S> turns, uint32_t to,
                                             const Barriers<S>& barriers) {
  const int entry = params.packed_stack_stride == 0 ? 0 : own.s;  // one matrix may serve all
  const int deep = params.deep, log_deep = params.log_deep();
  int row[S::kGroups];
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group)
    row[group] = (tile * params.across + (group >> log_deep) * 4) << params.log_rows;
  int slot = 0, parity = 1, next = own.first_unit;
  for (int i = 0; i < units; i += deep, next = turns.behind(next)) {
    if (i == deep) wait(barriers.rows_full(), 0);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const int share = group & deep - 1, at = group * S::kSlots + slot;
      if (i + share >= units || !has_rows(params, group)) continue;
      wait(barriers.empty(at), parity);
      arrive_and_expect(barriers.full(at), S::kBoxBytes);
      const int k = (next + turns.first(share)) * S::kRowBytes;
      const uint32_t box = to + at * S::kBoxBytes;
      copy_box(box, weights, k, row[group], entry, barriers.full(at));
      if (box_rows < S::kBoxRows)  // the second half of a gated activation
        copy_box(box + S::kBoxBytes / 2, weights, k, row[group] + params.width, entry,
                 barriers.full(at));
    }
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
}

// Copies the records of x, and what is known of its rows (RowOfX), in one thread.
template <typename S>
__device__ __forceinline__ void copy_x(const Image& image, int first_unit, int units,
                                       Turns<S> turns, uint32_t to, uint32_t rows,
                                       const Barriers<S>& barriers) {
  for (int i = 0; i < units * S::kQuads; ++i) {
    const int stage = i % S::kXStages;
    if (i >= S::kXStages) wait(barriers.x_empty(stage), i / S::kXStages % 2 ^ 1);
    arrive_and_expect(barriers.x_full(stage), S::kRecordBytes);
    const int quad = (first_unit + turns.at(i / S::kQuads)) * S::kQuads + i % S::kQuads;
    copy_bulk(to + stage * S::kRecordBytes, image.record(quad), S::kRecordBytes,
              barriers.x_full(stage));
    if (i > 0) continue;
    arrive_and_expect(barriers.rows_full(), S::kColumns * sizeof(RowOfX));
    copy_bulk(rows, image.rows(), S::kColumns * sizeof(RowOfX), barriers.rows_full());
  }
}

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
