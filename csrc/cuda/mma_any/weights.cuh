// How the work of the mma_any kernel is laid out, and the copies of the weights into a warp's ring.
#pragma once

#include "../common/epilogue.cuh"
#include "scales.cuh"

namespace jaxgemv::cuda::mma_any {

constexpr int kTileN = 16;  // rows of the weights

// Kernels for many columns of x use each fragment of it for two tiles of rows.
template <int kBits, int kColumnTiles>
struct Shape {
  static constexpr int kRowTiles = kColumnTiles > 2 ? 2 : 1, kRows = kTileN * kRowTiles;
  static constexpr bool kMany = kColumnTiles > 2;
  static constexpr int kMaxWarps = kMany ? 8 : 16, kStages = kMany ? 4 : 3;  // units in a ring
  // A unit of few columns: 64 to 128 bytes of each row of a tile.
  static constexpr int kQuads = kMany ? 1 : kBits <= 2 ? 4 : kBits <= 4 ? 2 : 1;
  static constexpr int kUnitK = kQuads * kQuadK;
  static constexpr int kUnitBytes = kUnitK * kBits / 8, kPieces = kUnitBytes / 16;
  // One piece more, and an odd number of them, so that eight rows lie in different banks.
  static constexpr int kPitch = ((kPieces + 1) | 1) * 16;
  static constexpr int kWeightBytes = kRows * kPitch;
  static constexpr int kSumsPitch = 8 * kColumnTiles + 1;  // floats, of a row of sums

  static JAXGEMV_HD constexpr int stage_bytes(int slots) {
    return kWeightBytes + kRowTiles * kQuads * slots * 128;
  }
  // Of a warp; sums of many columns take the place of all else when that is used up.
  static constexpr int kSumsBytes = kRows * kSumsPitch * 4;
  static JAXGEMV_HD constexpr int warp_bytes(int slots) {
    return kStages * stage_bytes(slots) + (kMany ? 0 : kSumsBytes);
  }
};

struct Params {
  const uint8_t* packed;
  Index packed_stack_stride;
  const uint8_t* image;  // of all rows of x; null where CTAs make their own
  XSource x;
  const int32_t* index;
  Groups groups;
  ScaleSource scales[2];  // and shifts
  Affine affine;
  int stack, M, row_bytes;
  int width, log_rows;         // of the result; and the rows of it in a tile, by log2
  int rows_m, m_tiles, parts;  // rows of x of a CTA, and the columns of each
  int tiles, tile_stride;      // runs of across * kRows rows of the weights, and steps of a CTA
  int across, deep;            // warps that have rows of their own, times those that share their K
  int ranks;                   // CTAs of a cluster, which share K
  int units, slice_units;      // of K; of which the x is in shared memory at a time
  int stage_bytes, slot_k;     // of a unit in the ring; codes that a slot of scales is for
  uint32_t results_magic;      // divides by the results of a CTA for a row of x
  bool plain;                  // no activation, no residual
  Output output;
  float eps;

  // Row i of a tile; those past the end repeat the last one. A gated activation's tile has eight rows
  // and those that they are paired with.
  __device__ __forceinline__ int row_of(int tile, int i) const {
    const int mask = (1 << log_rows) - 1;
    return min((tile << log_rows) + (i & mask), width - 1) + (i > mask ? width : 0);
  }
  __device__ __forceinline__ const uint8_t* row(int s, int n) const {
    return packed + s * packed_stack_stride + n * Index{row_bytes};
  }
};

// Brings a warp's units, of all its tiles of rows, one after another.
template <int kBits, int kColumnTiles>
class Weights {
  using S = Shape<kBits, kColumnTiles>;

 public:
  uint8_t* stage;  // when S::kStages units have been asked for, the first of them

  // Of units first .. last - 1, those that are this warp's.
  __device__ __forceinline__ Weights(const Params& params, int s, int tile, int warp, int first,
                                     int last, uint8_t* ring)
      : stage(ring),
        params_(params),
        ring_(ring),
        s_(s),
        warp_(warp),
        first_(first),
        last_(last),
        tile_(tile - params.tile_stride) {
    next_tile();
  }

  // Starts the copy of the next one.
  __device__ __forceinline__ void next() {
    if (tile_ < params_.tiles) {
      const int lane = threadIdx.x % 32;
      uint8_t* const to = stage + lane / 2 * S::kPitch + lane % 2 * 16;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        // All but the last unit of a row is whole, and so is what lies around it.
        const auto copy = [&](auto&& copy_piece) {
#pragma unroll
          for (int i = 0; i < (S::kPieces + 2) / 2; ++i)
            if (2 * i + 1 < S::kPieces || lane % 2 + 2 * i < pieces_[r])
              copy_piece(to + r * kTileN * S::kPitch + 32 * i, from_[r] + 32 * i, 32 * i);
        };
        if (unit_ + 2 < params_.units)
          copy([](void* to, const void* from, int) { copy16(to, from); });
        else
          copy([&](void* to, const void* from, int at) { copy_some(to, from, left_[r] - at); });
        from_[r] += params_.deep * S::kUnitBytes, left_[r] -= params_.deep * S::kUnitBytes;
      }
      uint8_t* slot = stage + S::kWeightBytes;
      const int end = (unit_ + 1) * S::kUnitK;
#pragma unroll 1
      for (int k = unit_ * S::kUnitK; k < end; k += params_.slot_k, slot += 128 * S::kRowTiles) {
        const int group = params_.groups.of(k);
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r) scales_[r].copy(slot + 128 * r, group);
      }
      unit_ += params_.deep;
      if (unit_ >= last_) next_tile();
    }
    commit_copies();
    stage += params_.stage_bytes;
    if (stage == ring_ + S::kStages * params_.stage_bytes) stage = ring_;
  }

 private:
  const Params& params_;
  uint8_t* const ring_;
  const int s_, warp_, first_, last_;
  int tile_, unit_;
  // Lanes copy every second piece of a row, from the 16 bytes around its start on.
  const uint8_t* from_[S::kRowTiles];
  int left_[S::kRowTiles], pieces_[S::kRowTiles];  // bytes of the row; pieces of a unit
  RowScale scales_[S::kRowTiles];

  __device__ __forceinline__ void next_tile() {
    tile_ += params_.tile_stride;
    if (tile_ >= params_.tiles) return;
    const int lane = threadIdx.x % 32;
    unit_ = first_ + warp_ % params_.deep;
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      const int tile = (tile_ * params_.across + warp_ / params_.deep) * S::kRowTiles + r;
      const uint8_t* const row = params_.row(s_, params_.row_of(tile, lane / 2));
      const int inside = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
      const int skipped = lane % 2 * 16 + unit_ * S::kUnitBytes - inside;
      from_[r] = row + skipped, left_[r] = params_.row_bytes - skipped;
      pieces_[r] = S::kPieces + (inside > 0);
      scales_[r] = RowScale(params_.scales, s_, params_.row_of(tile, lane % 16));
    }
  }
};

}  // namespace jaxgemv::cuda::mma_any
