// How weights and scales reach a warp: through a ring in shared memory, from which it loads operand A.
#pragma once

#include "params.cuh"

namespace jaxgemv::cuda::image {

// A warp's ring in shared memory: kStages units of kQuads quads, of kRowTiles tiles of rows.
template <int kBits, int kTiles, int kQuadCount, int kStageCount>
struct Ring {
  static constexpr int kRowTiles = kTiles, kRows = kTileN * kRowTiles;
  static constexpr float kWorth = Octet<kBits>::kWorth;  // factor of a sum
  static constexpr bool kKeepsPlace = kTiles == 1;       // where registers are not short
  static constexpr int kQuads = kQuadCount, kStages = kStageCount, kUnitK = kQuads * kQuadK;
  static constexpr int kUnitBytes = kUnitK * kBits / 8, kPieces = kUnitBytes / 16;
  // One piece more, as rows may begin inside one, and an odd number of them, so that eight rows lie in different banks.
  static constexpr int kPitch = ((kPieces + 1) | 1) * 16;
  static constexpr int kWeightBytes = kRows * kPitch;
  // A lane copies a piece of every (32 / kLanes)th row; the additional piece is one of a second or third pass.
  static constexpr int kLanes = kPieces >= 8 ? 8 : kPieces >= 4 ? 4 : 2;
  static constexpr int kCopies = kTileN * kLanes / 32, kPasses = (kPieces + kLanes) / kLanes;
  static constexpr int kRingBytes = kStages * kWeightBytes;
  // Scales are as far ahead as weights.
  static JAXGEMV_HD constexpr int scale_bytes(int pieces) {
    return kRowTiles * pieces * RowScale::kPieceBytes;
  }
  static JAXGEMV_HD constexpr int bytes(int pieces) {
    return kRingBytes + kStages * scale_bytes(pieces);
  }
};

// Where in the ring the scales of a unit are: a warp has one of these for copying, and one for using them.
template <typename S>
class Window {
 public:
  uint8_t* at;

  // ring: the warp's; scales lie behind its weights.
  __device__ __forceinline__ Window(const Params& params, uint8_t* ring)
      : at(ring + S::kRingBytes), params_(params), ring_(ring) {}

  // Whether a unit is the first of a window, to which this then moves on.
  __device__ __forceinline__ bool opens(int unit) {
    const int index = unit >> params_.windows.log_units;
    if (index == index_) return false;
    index_ = index, at += S::scale_bytes(params_.windows.pieces);
    if (at >= ring_ + S::bytes(params_.windows.pieces)) at = ring_ + S::kRingBytes;
    return true;
  }
  // Called when the next unit is the first of a tile.
  __device__ __forceinline__ void restart() { index_ = -1; }
  // The group with which the window begins.
  __device__ __forceinline__ int first() const {
    return params_.groups.of((index_ << params_.windows.log_units) * S::kUnitK);
  }

 private:
  const Params& params_;
  uint8_t* const ring_;
  int index_ = -1;
};

// Copies a warp's units, of all its tiles of rows, one after another. S: its Ring.
template <typename S>
class Weights {
 public:
  uint8_t* stage;  // once S::kStages units are asked for, the first of these

  // For one share of K: every `deep`th of units first .. last - 1, and rows `place` of each tile.
  __device__ __forceinline__ Weights(const Params& params, int s, int tile, int place, int share,
                                     int first, int last, uint8_t* ring)
      : stage(ring),
        params_(params),
        ring_(ring),
        s_(s),
        place_(place),
        first_(first + share),
        last_(last),
        to_(place_in_stage()),
        window_(params, ring),
        tile_(tile - params.tile_stride) {
    next_tile();
  }

  // The scales of the tiles of rows that next() has reached.
  using Scales = RowScale[S::kRowTiles];
  __device__ __forceinline__ const Scales& scales() const { return scales_; }

  // Starts the copy of the next unit.
  __device__ __forceinline__ void next() {
    if (tile_ < params_.tiles) {
      // All but the last unit of a row is whole, and so is what lies around it.
      if (unit_ + 2 < params_.units)
        copy([](void* to, const uint8_t* from, int) { copy16(to, from); });
      else
        copy([&](void* to, const uint8_t* from, int at) {
          copy_some(to, from, params_.row_bytes - unit_ * S::kUnitBytes - at);
        });
      from_ += params_.deep * S::kUnitBytes;
      if (window_.opens(unit_)) {
        const int group = window_.first(), pieces = params_.windows.pieces;
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r)
          scales_[r].copy(window_.at + r * pieces * RowScale::kPieceBytes, pieces, group,
                          params_.groups.last + 1);
      }
      unit_ += params_.deep;
      if (unit_ >= last_) next_tile();
    }
    commit_copies();
    stage += S::kWeightBytes;
    if (stage == ring_ + S::kRingBytes) stage = ring_;
  }

 private:
  const Params& params_;
  uint8_t* const ring_;
  const int s_, place_, first_, last_, to_;
  Window<S> window_;
  int tile_, unit_;
  const uint8_t* from_;  // this lane's piece of the unit in a row that begins with the matrix
  uint32_t rows_[S::kRowTiles][S::kCopies];  // where rows begin, in words
  RowScale scales_[S::kRowTiles];

  // copy_piece(to, from, bytes from the start of the unit in its row)
  template <typename Copy>
  __device__ __forceinline__ void copy(Copy&& copy_piece) {
    const int lane = threadIdx.x % S::kLanes;
    const auto pass = [&](int p) {
      const int piece = p * S::kLanes * 16;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < S::kCopies; ++i)
          copy_piece(stage + to_ + (r * kTileN + i * (32 / S::kLanes)) * S::kPitch + piece,
                     from_ + piece + uint64_t{rows_[r][i] / 4} * 16,
                     lane * 16 + piece - static_cast<int>(rows_[r][i] % 4 * 4));
    };
#pragma unroll
    for (int p = 0; p < S::kPasses; ++p) {
      const int left = S::kPieces - p * S::kLanes;  // pieces of a row that begins a piece
      if (left >= S::kLanes)
        pass(p);
      else if (lane < left || (lane == left && !params_.aligned))
        pass(p);
    }
  }

  // The place of this lane's first piece in a stage. Kept in a register, except where these are short.
  static __device__ __forceinline__ int place_in_stage() {
    const int lane = threadIdx.x % 32, at = lane / S::kLanes * S::kPitch + lane % S::kLanes * 16;
    return S::kKeepsPlace ? kept(at) : at;
  }

  __device__ __forceinline__ void next_tile() {
    tile_ += params_.tile_stride;
    if (tile_ >= params_.tiles) return;
    const int lane = threadIdx.x % 32;
    unit_ = first_;
    window_.restart();
    const uint8_t* const matrix = params_.packed + s_ * params_.packed_stack_stride;
    const int inside = static_cast<int>(reinterpret_cast<uintptr_t>(matrix) % 16);
    from_ = matrix - inside + unit_ * S::kUnitBytes + lane % S::kLanes * 16;
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      const int tile = (tile_ * params_.across + place_) * S::kRowTiles + r;
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i) {
        const int n = params_.row_of(tile, lane / S::kLanes + i * (32 / S::kLanes));
        rows_[r][i] = static_cast<uint32_t>((n * Index{params_.row_bytes} + inside) / 4);
      }
      scales_[r] = RowScale(params_.scales, s_, params_.row_of(tile, lane % 16));
    }
  }
};

// Calls take(h, low, high) with this lane's octet in block j of a quad, for rows g (h = 0) and g + 8. `words`: where
// the quad begins in a row. C: an Octet.
template <typename C, typename Take>
__device__ __forceinline__ void load_octets(const uint32_t* const (&rows)[2], int words, int j,
                                            bool runs, Take&& take) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t low, high;
    if (runs)
      C::of_run(rows[h] + words + t * C::kWidth, j, low, high);
    else
      C::load(rows[h] + words + j * C::kWidth, t, low, high);
    take(h, low, high);
  }
}

// Keeps one half of a block's codes in operand A, with zeros for the other.
__device__ __forceinline__ void keep_half(int half, uint32_t (&a)[4]) {
  const bool keeps = threadIdx.x % 4 / 2 == half;
#pragma unroll
  for (uint32_t& pair : a) pair = keeps ? pair : 0;
}

}  // namespace jaxgemv::cuda::image
