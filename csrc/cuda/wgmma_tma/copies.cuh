// What the threads of the wgmma_tma kernel that do not multiply ask for, and the barriers that tell when it is there.
#pragma once

#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Barriers in shared memory, of the stages of x and of the slots of all groups: when one is full, when it is empty.
template <typename S>
struct Barriers {
  static constexpr int kX = S::kXStages, kSlots = S::kGroups * S::kSlots,
                       kCount = 2 * (kX + kSlots) + 2;
  uint32_t first;

  __device__ __forceinline__ uint32_t x_full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return first + 8 * (kX + stage); }
  __device__ __forceinline__ uint32_t full(int slot) const { return first + 8 * (2 * kX + slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return first + 8 * (2 * kX + kSlots + slot);
  }
  __device__ __forceinline__ uint32_t rows_full() const {  // of what is known of rows of x
    return first + 8 * 2 * (kX + kSlots);
  }
  __device__ __forceinline__ uint32_t sent() const { return rows_full() + 8; }  // as gather has it
  // By a thread each: lanes of a warp would take turns. What the one that asks for weights uses it makes itself.
  __device__ __forceinline__ void init_of_weights() const {
    for (int i = 0; i < kSlots; ++i) init_barrier(full(i), 1), init_barrier(empty(i), 4);
    init_barrier(rows_full(), 1);
    fence_barrier_init();
  }
  // warps: that use a stage of x.
  __device__ __forceinline__ void init_of_x(int warps) const {
    for (int i = 0; i < kX; ++i) init_barrier(x_full(i), 1), init_barrier(x_empty(i), warps);
    init_barrier(sent(), 1);
    fence_barrier_init();
  }
};

// The boxes of all groups, by one thread, which has to be quick: they use one up each 300 ns. The second ones wait for
// the first of x; by a barrier of one phase, since a stage of x does not wait for this thread, which may sleep through two.
template <typename S>
__device__ __forceinline__ void copy_weights(const Params& params, const Share& own, int tile,
                                             int units, const CUtensorMap& weights, int box_rows,
                                             uint32_t to, const Barriers<S>& barriers) {
  const int entry = params.packed_stack_stride == 0 ? 0 : own.s;  // one matrix may serve all
  const int deep = params.deep, log_deep = params.log_deep();
  int row[S::kGroups];
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group)
    row[group] = (tile * params.across + (group >> log_deep) * 4) << params.log_rows;
  int slot = 0, parity = 1;
  for (int i = 0; i < units; i += deep) {
    if (i == deep) wait(barriers.rows_full(), 0);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const int unit = i + (group & deep - 1), at = group * S::kSlots + slot;
      if (unit >= units) continue;
      wait(barriers.empty(at), parity);
      arrive_and_expect(barriers.full(at), S::kBoxBytes);
      const int k = (own.first_unit + unit) * S::kRowBytes;
      const uint32_t box = to + at * S::kBoxBytes;
      copy_box(box, weights, k, row[group], entry, barriers.full(at));
      if (box_rows < S::kBoxRows)  // of a gated activation
        copy_box(box + S::kBoxBytes / 2, weights, k, row[group] + params.width, entry,
                 barriers.full(at));
    }
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
}

// The records of x, and what is known of its rows, by one thread.
template <typename S>
__device__ __forceinline__ void copy_x(const Image& image, int first, int quads, uint32_t to,
                                       uint32_t rows, const Barriers<S>& barriers) {
  for (int i = 0; i < quads; ++i) {
    const int stage = i % S::kXStages;
    if (i >= S::kXStages) wait(barriers.x_empty(stage), i / S::kXStages % 2 ^ 1);
    arrive_and_expect(barriers.x_full(stage), S::kRecordBytes);
    copy_bulk(to + stage * S::kRecordBytes, image.record(first + i), S::kRecordBytes,
              barriers.x_full(stage));
    if (i > 0) continue;
    arrive_and_expect(barriers.rows_full(), S::kColumns * sizeof(RowOfX));
    copy_bulk(rows, image.rows(), S::kColumns * sizeof(RowOfX), barriers.rows_full());
  }
}

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
