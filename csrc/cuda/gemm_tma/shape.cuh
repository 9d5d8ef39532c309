// What the gemm_tma kernel keeps in shared memory, and its barriers.
#pragma once

#include "../common/grid.cuh"
#include "../common/hopper.cuh"
#include "../gemm/numbers.cuh"
#include "../image/params.cuh"

namespace jaxgemv::cuda::gemm_tma {

using namespace hopper;
using namespace image;

constexpr int kTileRows = 128;         // rows of the weights in a tile
constexpr int kTurnStages = 2;         // stages that a warp decodes in a turn
constexpr int kXAt = kTileRows * 128;  // x in a stage, behind the weights

// For up to kMostColumns rows of x, 128 or 256. X: of x and of the rounded weights; float is TF32.
template <Format kFormat, int kWidth, typename X, int kMostColumns>
struct Shape {
  static constexpr int kBits = kWidth;
  using C = gemm::Numbers<kFormat, kBits>;
  static constexpr int kColumns = kMostColumns;
  // Slots of a quad with terms of their own, at most: of 32 codes, or of 16 for tables.
  static constexpr int kMostSlots = C::kEntries > 0 ? 8 : 4, kSlotK = kQuadK / kMostSlots;
  static constexpr int kStageK = 128 / sizeof(X);  // 128 bytes of a row, as the swizzle has it
  static constexpr int kTurnK = kTurnStages * kStageK;
  // Warps that multiply, 64 rows for every four; then those that decode, in groups of four that take turns; then one
  // that asks for weights and x. With 256 columns there are no registers for that one, nor for a second group.
  static constexpr bool kBrings = kColumns <= 128;
  static constexpr int kConsumers = 8, kTurns = kBrings ? 2 : 1, kDecoders = 4 * kTurns;
  static constexpr int kThreads = 32 * (kConsumers + kDecoders + kBrings);
  // Stages of both operands, and boxes of codes, each of one quad or two.
  static constexpr int kStages = 4, kStageBytes = kXAt + kColumns * 128;
  static constexpr int kUnitK = (kBits <= 4 ? 2 : 1) * kQuadK, kBoxTurns = kUnitK / kTurnK;
  static constexpr int kBoxStages = kBoxTurns * kTurnStages;
  static constexpr int kRoundStages = kBoxStages > kStages ? kBoxStages : kStages;
  static constexpr int kStageRowBytes = kStageK * kBits / 8;
  static constexpr int kRowBytes = kUnitK * kBits / 8, kBoxBytes = kTileRows * kRowBytes;
  // Whether two CTAs of a cluster may decode half of a tile each, for both.
  static constexpr bool kPairs = !kBrings;
  static constexpr int kSlots = kBrings ? 4 : 2;        // in a pair twice as many, of half the rows
  static constexpr int kBoxes = kStages * kStageBytes;  // where they begin
  static constexpr int kSharedBytes = kBoxes + kSlots * kBoxBytes;
};

// Rows of x that each CTA of a pair asks for, of rows_m that they have together: whole eights, as the swizzle needs
// them. Behind these a stage holds anything, which makes columns that nobody stores.
JAXGEMV_HD constexpr int rows_of_x(int rows_m, int pair) {
  return ((rows_m + pair - 1) / pair + 7) & ~7;
}

// The row of a tile of the weights that is row i of operand A: a lane's sums, rows g and g + 8 of 16, are neighbours.
JAXGEMV_HD constexpr int row_of_operand(int i) { return (i & ~15) | i % 8 * 2 | i / 8 % 2; }

// How a thread loads scales, [0], and shifts, [1]. step: slots from one that begins a group to the next; by_eights:
// whether the 8 bytes that have all of a turn may be loaded at once.
struct Loads {
  int step;
  bool by_eights[2];
};

// Scales of one byte that a thread may load several at a time: of groups of 16 or 32 codes, 8 or 4 bytes a quad, in
// pieces of 4 bytes or 2 as rows are aligned. 0 bytes: any other scales.
struct QuadScales {
  int bytes = 0, piece = 0;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of the result, by its number among the weights' rows and among x's; and its rows of x, M from m0 on, which in
// the batch begin at first_row.
struct Tile {
  int number, column;
};
struct RowsOfX {
  int m0, M;
  Index first_row;
};

// A CTA's share of the work: its tiles, one after another, its units of K, and the weights that it decodes. Two CTAs
// that have the same weights and share of K may be a pair.
template <typename S>
struct Work : Share {
  int ctas = 1, half = 0;  // CTAs of the pair, and which this is
  int first_stage, stages;
  int step;  // from one tile to the next

  __device__ __forceinline__ Work(const Params& params, int pair)
      : Share(params, cluster_of_cta(), rank_of_cta() >> (pair > 1)) {
    if (S::kPairs && pair > 1) ctas = 2, half = blockIdx.x % 2;
    first_stage = first_unit * S::kBoxStages;
    const int all = (params.x.K + S::kStageK - 1) / S::kStageK;
    stages = s < 0 ? 0 : min(last_unit * S::kBoxStages, all) - first_stage;
    step = over(static_cast<int>(gridDim.x), params.ranks * ctas);
  }
  // Stages of a tile, with empty ones behind K: a tile begins where a round of stages and of boxes does.
  __device__ __forceinline__ int rounded() const {
    return (stages + S::kRoundStages - 1) / S::kRoundStages * S::kRoundStages;
  }
  __device__ __forceinline__ RowsOfX rows_of(const Params& params, const Tile& tile) const {
    const int rows = ctas > 1 ? (params.rows_m + 1) / 2 : params.rows_m;
    const int begin = tile.column * params.rows_m, m0 = begin + half * rows;
    const int M = max(min(min(params.M, begin + params.rows_m) - m0, rows), 0);
    return {m0, M, Index{blockIdx.y} * params.M + m0};
  }
  // The stages of all its tiles.
  __device__ __forceinline__ int all_stages(const Params& params) const {
    const int left = params.tiles * params.m_tiles - cluster;
    return left > 0 ? rounded() * over(left + step - 1, step) : 0;
  }
  // Calls use(tile) for each tile of this CTA.
  template <typename Use>
  __device__ __forceinline__ void each_tile(const Params& params, Use&& use) const {
#pragma unroll 1
    for (int i = cluster; i < params.tiles * params.m_tiles; i += step)
      use(tile_of(i, params.m_tiles));
  }
  // rows(), first(): the rows of a tile's weights that this CTA decodes; warps(): how many warps decode a turn;
  // turns(): how many such groups of warps there are.
  __device__ __forceinline__ int rows() const { return kTileRows / ctas; }
  __device__ __forceinline__ int first() const { return half * rows(); }
  __device__ __forceinline__ int warps() const { return 4 / ctas; }
  __device__ __forceinline__ int turns() const { return S::kTurns * ctas; }
  __device__ __forceinline__ int slots() const { return S::kSlots * ctas; }
  __device__ __forceinline__ int box_bytes() const { return S::kBoxBytes / ctas; }
  static __device__ __forceinline__ Tile tile_of(int i, int m_tiles) {
    const int number = over(i, m_tiles);
    return {number, i - number * m_tiles};
  }
  // The rank in the cluster of the CTA that has share `rank` of K of the same result; and of the other CTA of this
  // pair.
  __device__ __forceinline__ int of(int rank) const { return rank * ctas + half; }
  __device__ __forceinline__ int other() const { return rank * ctas + 1 - half; }
};

// Where the thread that issues copies is: a tile, and a stage in it. It moves by additions, as divisions would take
// longer than what they are for.
template <typename S>
class Cursor {
 public:
  __device__ __forceinline__ Cursor(const Params& params, const Work<S>& own)
      : tiles_(own.stages > 0 ? params.tiles : 0),
        m_tiles_(params.m_tiles),
        tile_(Work<S>::tile_of(own.cluster, m_tiles_)),
        step_(Work<S>::tile_of(own.step, m_tiles_)) {}

  __device__ __forceinline__ bool is_over() const { return tile_.number >= tiles_; }
  __device__ __forceinline__ const Tile& tile() const { return tile_; }
  __device__ __forceinline__ int stage() const { return stage_; }
  // Moves on by `stages` stages; a tile, of `of_tile` stages, ends with such a step.
  __device__ __forceinline__ void go_on(int stages, int of_tile) {
    stage_ += stages;
    if (stage_ < of_tile) return;
    stage_ = 0, tile_.number += step_.number, tile_.column += step_.column;
    if (tile_.column >= m_tiles_) tile_.column -= m_tiles_, ++tile_.number;
  }

 private:
  const int tiles_, m_tiles_;
  Tile tile_;
  const Tile step_;
  int stage_ = 0;
};

// full, empty: when a stage has been decoded and x is there, and when it has been used. came, read: when a box is
// there, and has been read. decoded: when this CTA has decoded what it has of a stage. A pair uses a stage together.
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
