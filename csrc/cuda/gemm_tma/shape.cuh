// What the gemm_tma kernel keeps in shared memory, and its barriers.
#pragma once

#include "../common/hopper.cuh"
#include "../gemm/numbers.cuh"
#include "../mma_any/params.cuh"

namespace jaxgemv::cuda::gemm_tma {

using namespace hopper;
using namespace mma_any;

constexpr int kTileRows = 128;         // of the weights, of a CTA
constexpr int kTurnStages = 2;         // that a warp decodes in a turn
constexpr int kXAt = kTileRows * 128;  // of a stage, behind the weights

// For up to kMostColumns rows of x, 128 or 256. X: of x and of the rounded weights; float is TF32.
template <Format kFormat, int kWidth, typename X, int kMostColumns>
struct Shape {
  static constexpr int kBits = kWidth;
  using C = gemm::Numbers<kFormat, kBits>;
  static constexpr int kColumns = kMostColumns;
  // Of a quad, with terms of their own: groups of 32 codes and more, and of tables of 16.
  static constexpr int kMostSlots = C::kEntries > 0 ? 8 : 4, kSlotK = kQuadK / kMostSlots;
  static constexpr int kStageK = 128 / sizeof(X);  // 128 bytes of a row, as the swizzle has it
  static constexpr int kTurnK = kTurnStages * kStageK;
  // Warps that multiply, 64 rows each four; then those that decode, in groups of four that take turns; then one
  // that asks for weights and x. For 256 columns there are no registers for that one, nor for a second turn.
  static constexpr bool kBrings = kColumns <= 128;
  static constexpr int kConsumers = 8, kTurns = kBrings ? 2 : 1, kDecoders = 4 * kTurns;
  static constexpr int kThreads = 32 * (kConsumers + kDecoders + kBrings);
  // Stages of both operands, and boxes of codes, each of one quad or two.
  static constexpr int kStages = 4, kStageBytes = kXAt + kColumns * 128;
  static constexpr int kUnitK = (kBits <= 4 ? 2 : 1) * kQuadK, kBoxTurns = kUnitK / kTurnK;
  static constexpr int kStageRowBytes = kStageK * kBits / 8;
  static constexpr int kRowBytes = kUnitK * kBits / 8, kBoxBytes = kTileRows * kRowBytes;
  // Whether two CTAs of a cluster may decode half of a tile each, for both.
  static constexpr bool kPairs = !kBrings;
  static constexpr int kSlots = kBrings ? 4 : 2;        // twice as many of half as many rows
  static constexpr int kBoxes = kStages * kStageBytes;  // where they begin
  static constexpr int kSharedBytes = kBoxes + kSlots * kBoxBytes;
};

// Rows of x that each CTA of a pair asks for, of rows_m that they have together: whole eights, as the swizzle has them.
// Behind these a stage holds anything, of which columns come that nobody stores.
JAXGEMV_HD constexpr int rows_of_x(int rows_m, int pair) {
  return ((rows_m + pair - 1) / pair + 7) & ~7;
}

// Scales of one byte that a thread may load several at a time: of groups of 16 or 32 codes, 8 or 4 bytes a quad, in
// pieces of 4 bytes or 2 as rows are aligned. 0 bytes: any other scales.
struct QuadScales {
  int bytes = 0, piece = 0;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a CTA has of the work: its units of K and rows of x, and of the weights what it decodes. Two that have the same
// weights and share of K may be a pair.
template <typename S>
struct Work : Share {
  int ctas = 1, half = 0;  // of the pair

  __device__ __forceinline__ Work(const Params& params, int pair)
      : Share(params, pair > 1 ? blockIdx.x / 2 : blockIdx.x) {
    if (!S::kPairs || pair < 2) return;
    ctas = 2, half = blockIdx.x % 2;
    const int rows = (params.rows_m + 1) / 2;
    m0 += half * rows, first_row += half * rows, M = max(min(M - half * rows, rows), 0);
  }
  // Rows of the weights to decode, from which of the tile's on; by so many warps, in so many turns.
  __device__ __forceinline__ int rows() const { return kTileRows / ctas; }
  __device__ __forceinline__ int first() const { return half * rows(); }
  __device__ __forceinline__ int warps() const { return 4 / ctas; }
  __device__ __forceinline__ int turns() const { return S::kTurns * ctas; }
  __device__ __forceinline__ int slots() const { return S::kSlots * ctas; }
  __device__ __forceinline__ int box_bytes() const { return S::kBoxBytes / ctas; }
  // The cluster's number of the CTA that has share `rank` of K of the same result, and of the other one of this pair.
  __device__ __forceinline__ int of(int rank) const { return rank * ctas + half; }
  __device__ __forceinline__ int other() const { return rank * ctas + 1 - half; }
};

// When a stage has been decoded and x is there, and when it has been used; when a box is there, and has been read; and
// when this CTA has decoded what it has of a stage. A pair uses a stage together.
template <typename S>
struct Barriers {
  static constexpr int kSlots = S::kSlots * (S::kPairs ? 2 : 1);
  static constexpr int kCount = 2 * (S::kStages + kSlots) + (S::kPairs ? S::kStages : 0);
  uint32_t first;

  __device__ __forceinline__ uint32_t full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return first + 8 * (S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t came(int slot) const {
    return first + 8 * (2 * S::kStages + slot);
  }
  __device__ __forceinline__ uint32_t read(int slot) const {
    return first + 8 * (2 * S::kStages + kSlots + slot);
  }
  __device__ __forceinline__ uint32_t decoded(int stage) const {
    return first + 8 * (2 * (S::kStages + kSlots) + stage);
  }
  __device__ __forceinline__ void init(const Work<S>& own) const {
    for (int i = 0; i < S::kStages; ++i) {
      init_barrier(full(i), own.warps() + 1), init_barrier(empty(i), own.ctas * S::kConsumers);
      if (S::kPairs) init_barrier(decoded(i), own.warps());
    }
    for (int i = 0; i < own.slots(); ++i)
      init_barrier(came(i), 1), init_barrier(read(i), own.warps() * min(own.turns(), S::kBoxTurns));
    fence_barrier_init();
  }
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
