// How the work of the mma_any kernel is laid out, and the copies of the weights into a warp's ring.
#pragma once

#include "../common/epilogue.cuh"
#include "scales.cuh"

namespace jaxgemv::cuda::mma_any {

constexpr int kTileN = 16;  // rows of the weights

// A warp's ring in shared memory: kStages units of kQuads quads, of kRowTiles tiles of rows.
template <int kBits, int kTiles, int kQuadCount, int kStageCount>
struct Ring {
  static constexpr int kRowTiles = kTiles, kRows = kTileN * kRowTiles;
  static constexpr int kQuads = kQuadCount, kStages = kStageCount, kUnitK = kQuads * kQuadK;
  static constexpr int kUnitBytes = kUnitK * kBits / 8, kPieces = kUnitBytes / 16;
  // One piece more, and an odd number of them, so that eight rows lie in different banks.
  static constexpr int kPitch = ((kPieces + 1) | 1) * 16;
  static constexpr int kWeightBytes = kRows * kPitch;
  // Lanes copy a piece of every (32 / kLanes)th row; the piece more is one of a second or third pass.
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

struct Params {
  const uint8_t* packed;
  Index packed_stack_stride;
  const uint8_t* image;  // of all rows of x; null where CTAs make their own
  XSource x;
  const int32_t* index;
  Groups groups;
  ScaleSource scales[2];  // and shifts
  ShiftTerm shift;
  int stack, M, row_bytes;
  int width, log_rows;         // of the result; and the rows of it in a tile, by log2
  int rows_m, m_tiles, parts;  // rows of x of a CTA, and the columns of each
  int tiles, tile_stride;      // runs of across * kRows rows of the weights, and steps of a CTA
  int across, deep;            // warps that have rows of their own, and shares of K for each
  int ranks;                   // CTAs of a cluster, which share K
  int units, slice_units;      // of K; of which the x is in shared memory at a time
  Windows windows;             // of scales
  bool aligned;                // every row of the weights, to 16 bytes
  bool plain;                  // no activation, no residual
  Output output;
  float eps;

  // Row i of a tile; those past the end repeat the last one. A gated activation's tile has eight
  // rows and those that they are paired with.
  __device__ __forceinline__ int row_of(int tile, int i) const {
    const int mask = (1 << log_rows) - 1;
    return min((tile << log_rows) + (i & mask), width - 1) + (i > mask ? width : 0);
  }
  __device__ __forceinline__ const uint8_t* row(int s, int n) const {
    return packed + s * packed_stack_stride + n * Index{row_bytes};
  }
};

// Operand A of block j of a quad whose codes begin `words` behind both rows of a lane, g and g + 8.
template <int kBits>
__device__ __forceinline__ void load_octets(const uint32_t* const (&rows)[2], int words, int j,
                                            bool runs, uint32_t (&a)[2][4]) {
  using C = Octet<kBits>;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t low, high;
    if (runs)
      C::of_run(rows[h] + words + t * kBits, j, low, high);
    else
      C::load(rows[h] + words + j * kBits, t, low, high);
    C::pairs(low, high, a[h]);
  }
}

// Zeros in place of one half of a block.
__device__ __forceinline__ void keep_half(int half, uint32_t (&a)[2][4]) {
  const bool keeps = threadIdx.x % 4 / 2 == half;
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = keeps ? a[i / 4][i % 4] : 0;
}

// What a CTA has of the work: its units of K, and its rows of x.
struct Share {
  int cluster, rank, s;
  int first_unit, last_unit;
  int m0, M, columns;
  Index first_row;  // of x, in the batch

  __device__ __forceinline__ explicit Share(const Params& params)
      : cluster(static_cast<int>(blockIdx.x) / params.ranks),
        rank(static_cast<int>(blockIdx.x) - cluster * params.ranks),
        s(stack_entry(params.index, params.stack, blockIdx.y)),
        first_unit(params.units * rank / params.ranks),
        last_unit(params.units * (rank + 1) / params.ranks),
        m0(cluster % params.m_tiles * params.rows_m),
        M(min(params.M - m0, params.rows_m)),
        columns(M * params.parts),
        first_row(Index{blockIdx.y} * params.M + m0) {}
};

// Makes the records of `quads` quads, from `first` on, of a CTA's rows of x, by `threads` threads:
// whole warps. when_asked() is called once, when the first of x has been asked for.
template <int kBits, typename WhenAsked>
__device__ __forceinline__ void make_records(const Params& params, const Share& own, uint8_t* image,
                                             int first, int quads, int threads,
                                             WhenAsked&& when_asked) {
  const int tasks = quads * own.M;
  const NormValues norm(params.x.norm, own.s, 0);
#pragma unroll 1
  for (int i = 0; i < tasks; i += threads / 16) {  // all lanes of a warp stay together
    const int task = min(i + static_cast<int>(threadIdx.x) / 16, tasks - 1);
    const int quad = task / own.M, m = task - quad * own.M;
    const int k = (first + quad) * kQuadK + static_cast<int>(threadIdx.x) % 16 * 8;
    float raw[8];
    load_octet_of_x(params.x, own.first_row + m, k, raw);
    if (i == 0) when_asked();
    put_quad<kBits>(raw, image + quad * (kRecordBytes * own.columns), m * params.parts, own.columns,
                    params.parts, params.groups.slots, norm, k, params.x.K);
  }
}

// Keeps the compiler from computing v again, later.
__device__ __forceinline__ int kept(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Where the scales of a unit are, for the warp that copies them and for the same one as it uses them.
template <typename S>
class Window {
 public:
  uint8_t* at;

  // ring: of the warp; scales lie behind its weights.
  __device__ __forceinline__ Window(const Params& params, uint8_t* ring)
      : at(ring + S::kRingBytes), params_(params), ring_(ring) {}

  // Whether a unit is the first of a window.
  __device__ __forceinline__ bool opens(int unit) {
    const int index = unit >> params_.windows.log_units;
    if (index == index_) return false;
    index_ = index, at += S::scale_bytes(params_.windows.pieces);
    if (at >= ring_ + S::bytes(params_.windows.pieces)) at = ring_ + S::kRingBytes;
    return true;
  }
  // The next unit is the first of a tile.
  __device__ __forceinline__ void restart() { index_ = -1; }
  // The group with which it begins.
  __device__ __forceinline__ int first() const {
    return params_.groups.of((index_ << params_.windows.log_units) * S::kUnitK);
  }

 private:
  const Params& params_;
  uint8_t* const ring_;
  int index_ = -1;
};

// Brings a warp's units, of all its tiles of rows, one after another. S: its Ring.
template <typename S>
class Weights {
 public:
  uint8_t* stage;  // when S::kStages units have been asked for, the first of them

  // Of units first .. last - 1, those of one share of K, for rows `place` of each tile.
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

  // Of the tiles of rows where next() is.
  using Scales = RowScale[S::kRowTiles];
  __device__ __forceinline__ const Scales& scales() const { return scales_; }

  // Starts the copy of the next one.
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

  // copy_piece(to, from, how far from the start of the unit in its row)
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

  // The place of this lane's first piece in a stage. Kept, but where registers are short.
  static __device__ __forceinline__ int place_in_stage() {
    const int lane = threadIdx.x % 32, at = lane / S::kLanes * S::kPitch + lane % S::kLanes * 16;
    return S::kRowTiles == 1 ? kept(at) : at;
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

}  // namespace jaxgemv::cuda::mma_any
