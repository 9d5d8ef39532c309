// How the streaming kernel brings in weights and scales: its parameters, the copies into a warp's ring, and the
// terms that are made of scales.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/affine.cuh"
#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "rows.cuh"

namespace jaxgemv::cuda::stream {

// How scales and shifts lie: one for each row of the weights (kByRow); one for each group of 2^n blocks,
// in rows of whole words (kByBlock); or one for each half of a block (kByHalf). For tables there are also scales that
// are multiplied into the operand: e8m0 for each 32 codes, e4m3 for each 16.
enum class Scales { kByRow, kByBlock, kByHalf, kE8M0, kE4M3 };

// How many groups of a span of `blocks` blocks have scales of their own.
JAXGEMV_HD constexpr int groups_of(Scales scales, int blocks) {
  return scales == Scales::kByHalf ? 2 * blocks : blocks;
}
JAXGEMV_HD constexpr bool go_into_operand(Scales scales) { return scales >= Scales::kE8M0; }
// Bytes of scales for a row's span, which is 128 bytes of codes.
JAXGEMV_HD constexpr int operand_scale_bytes(Scales scales) {
  return scales == Scales::kE8M0 ? 8 : 16;
}

// i * of_columns >> kOfColumnsLog is i / columns, for the few columns of a CTA.
constexpr int kOfColumnsLog = 16;

// The kernel's parameters, in the order in which they are needed. Rows of the weights come in tiles of
// kTileN; with a gated activation a tile is kTileN / 2 rows of the first half and their partners in the second,
// and a "row" below is a pair of them.
struct Params {
  const uint8_t* packed;
  const void* x;
  Dtype x_dtype;
  const int32_t* index;
  int rows_a_cta, more, unit;  // the first `more` CTAs have `unit` rows more
  int m_tiles;                 // CTAs next to each other that read the same weights
  int tiles;                   // tiles of each CTA
  int of_columns;              // 2^kOfColumnsLog over the columns of a tile, and a little more
  int tile_step, tile_apart;
  // Bytes by which the second half of a tile lies further away than if it followed the first: weights, scales.
  Index apart_bytes;
  int scale_apart;
  int block_tiles;  // tiles whose partial sums fit into shared memory together
  // Bytes of shared memory behind the rings: of the x that a warp stages; to the first warp's partial sums; and
  // from a warp's partial sums to the next warp's. These may lie where x was, which is read once.
  int x_bytes, partials, partial_bytes;
  int slices;
  int M, N, K, row_bytes;  // rows are whole words
  int group_log;           // a group is 2^this blocks
  int scale_log;           // a scale, and a shift, is 2^this bytes
  int scale_row;           // bytes from row to row
  // 2^words_log words of scales are copied for a row's span; where it is one word, 2^spans_log spans may share it.
  // odd_rows, 0 or 1: whether odd rows begin in the middle of a word, so that a span has a word more.
  int words_log, spans_log, odd_rows;
  Affine affine;
  uint32_t stack;
  Param scale, shift, codebook;
  Index packed_stack_stride;
  Output output;
  const char* norm;
  Dtype norm_dtype;
  Index norm_stack_bytes;
  int norm_bytes, norm_row_bytes;  // bytes of a warp's span, or 0; and of K
  float eps;
  int teams, team_warps, team_log;  // see Team; team_log: log2 of team_warps, or 31
};

// A team is the warps that share K: mostly a whole CTA. But where a table takes so much shared memory that few CTAs
// fit on an SM, and K is short, a CTA has several teams, of a power of two warps each, with rows of their own.
template <Format kFormat, Scales kScales>
struct Team {
  static constexpr bool kMayBeSeveral = kFormat == Format::kCodebook && !go_into_operand(kScales);
  static __device__ __forceinline__ int warps(const Params& params) {
    return kMayBeSeveral ? params.team_warps : blockDim.x / 32;
  }
  // The team of a warp of the CTA, and the warp's place in it.
  static __device__ __forceinline__ int number(const Params& params, unsigned warp) {
    return kMayBeSeveral ? warp >> params.team_log : 0;
  }
  static __device__ __forceinline__ unsigned place(const Params& params, unsigned warp) {
    return kMayBeSeveral ? warp & ((1u << params.team_log) - 1) : warp;
  }
};

// How rows lie in tiles. For kernels without parts these are constants, for others kernel parameters, which
// take no registers.
template <Parts kParts>
struct Tiling {
  static constexpr bool kMayBeGated = kParts != Parts::kNone;
  const Params& params;
  // Rows from a tile to the next, and from its first half to its second.
  __device__ __forceinline__ int step() const { return kMayBeGated ? params.tile_step : kTileN; }
  __device__ __forceinline__ int apart() const {
    return kMayBeGated ? params.tile_apart : kTileN / 2;
  }
  // How much further away the second half of a tile lies than if it followed the first; of row i, in rows.
  __device__ __forceinline__ Index extra_bytes() const {
    return kMayBeGated ? params.apart_bytes : 0;
  }
  __device__ __forceinline__ int extra_of_scales() const {
    return kMayBeGated ? params.scale_apart : 0;
  }
  __device__ __forceinline__ int extra(int i) const {
    return kMayBeGated && i >= kTileN / 2 ? params.tile_apart - kTileN / 2 : 0;
  }
};

// How many bytes of the first word of a span's scales belong to earlier groups, in row `row` of a tile: where odd
// rows do not begin with a word, tiles begin with even rows.
template <int kBlocks>
__device__ __forceinline__ int scales_before(const Params& params, int span, int row) {
  return (span * kBlocks >> params.group_log << params.scale_log & 3) + (row & params.odd_rows) * 2;
}

// Copies a warp's spans of the weights, and the scales that go with them, tile after tile and slice
// after slice of a block of tiles. kPiece: bytes that are copied at once.
template <Format kFormat, Scales kScales, typename Rows, Parts kParts, int kStages,
          bool kMayBeginInWord = false, int kPiece = 16>
struct Pipeline {
  using Team = stream::Team<kFormat, kScales>;
  static constexpr bool kHasShift = kFormat == Format::kAffine;
  static constexpr bool kAnyIsFinite = kHasShift || kFormat == Format::kCodebook;  // of codes
  static constexpr int kSpanBytes = Rows::kBytes, kBlocks = Rows::kBlocks;
  // Scales for a row of a span, of 32 bits; those for groups of 16 are shorter.
  static constexpr int kNumbers =
      !kHasShift && Rows::kLaneUnits == 1 ? kBlocks : groups_of(kScales, kBlocks);
  static constexpr int kWeightBytes = kTileN * Rows::kRowBytes;
  static constexpr int kScaleBytes = kScales == Scales::kByRow ? 0
                                     : go_into_operand(kScales)
                                         ? kTileN * operand_scale_bytes(kScales)
                                         : kTileN * (kHasShift ? 8 : 4) * kNumbers;
  static constexpr int kCopiesOfScales =
      go_into_operand(kScales) ? kScaleBytes / 128 : kNumbers / 2;
  static constexpr int kBytes = kWeightBytes + kScaleBytes;  // of a stage
  // One copy of weights by a warp: lanes for each row, of which some may have no piece, and rows.
  static constexpr int kPieces = kSpanBytes / kPiece;
  static constexpr int kLanes = std::min(std::bit_ceil(unsigned{kPieces}), 32u),
                       kRows = 32 / kLanes;
  const Params& params;
  const Tiling<kParts> tiling;
  uint8_t* const ring;
  const int tiles, last_step;  // rows to the last tile
  const uint8_t* from;
  uint8_t* to;
  const char* scale_from;
  int left, slice = 0, offset, stage = 0;
  int rows_left;    // to the end of the weights, where the last tile may be longer
  int scale_bytes;  // bytes that exist of this lane's word in the span

  __device__ __forceinline__ Pipeline(const Params& params, uint32_t s, int first_row, int last_row,
                                      int tiles, uint8_t* ring)
      : params(params),
        tiling{params},
        ring(ring),
        tiles(tiles),
        last_step(last_row - first_row - (tiles - 2) * tiling.step()),
        left(tiles) {
    const int warp = Team::place(params, threadIdx.x / 32), lane = threadIdx.x % 32;
    const int row = lane / kLanes, piece = lane % kLanes;
    to = ring + Rows::place(row, piece * kPiece);
    offset = warp * kSpanBytes + piece * kPiece;
    from = params.packed + ((first_row + row) * Index{params.row_bytes} + offset);
    from += s * params.packed_stack_stride;
    if (kPiece == 16 && piece >= kPieces) offset = 1 << 30;  // treated as past the row's end
    if constexpr (kPiece == 4) rows_left = params.N - first_row;
    if constexpr (kScales != Scales::kByRow) {
      // In a span of a row, first the words of its scales, then those of its shifts.
      const Param& param = kHasShift && lane >> params.words_log & 1 ? params.shift : params.scale;
      const Index stack_bytes = param.stack_stride << params.scale_log;
      scale_from = static_cast<const char*>(param.data) + stack_bytes * s;
      scale_from += (first_row + (lane >> (params.words_log + kHasShift))) * params.scale_row;
      scale_from += offset_of_scales() - before_row();
      scale_bytes = bytes_of_scales();
    }
  }

  // Starts the copy of the next tile. When kStages have been started, `stage` is the oldest.
  __device__ __forceinline__ void next() {
    if (slice < params.slices) {
      const int warps = Team::warps(params);
      // Past the end of a row stale codes stay in the ring, which meet x = 0. As float8 they could be NaN, so those are
      // replaced by zeros.
      if constexpr (kPiece == 4)
        copy_words();
      else if (!kAnyIsFinite || offset < params.row_bytes)
#pragma unroll
        for (int i = 0; i < kTileN / kRows; ++i) {
          uint8_t* const piece = to + stage + i * kRows * Rows::kRowBytes;
          const uint8_t* const source = from + i * kRows * Index{params.row_bytes} +
                                        (i * kRows < kTileN / 2 ? 0 : tiling.extra_bytes());
          if (kAnyIsFinite)
            copy16(piece, source);
          else
            copy_or_zeros(piece, source, offset < params.row_bytes);
        }
      const int rows = left == 2 ? last_step : tiling.step();
      from += rows * params.row_bytes;
      if constexpr (kScales != Scales::kByRow) {
        copy_scales(0);
        // A second copy is needed for scales of 32 bits for each block.
        if (kHasShift && 1 << params.words_log > kCopiesOfScales) [[unlikely]]
          copy_scales(kCopiesOfScales);
        scale_from += rows * params.scale_row;
      }
      if constexpr (kPiece == 4) rows_left -= rows;
      if (--left == 0) {  // back to the first tile, one slice further
        const int rows = last_step + (tiles - 1) * tiling.step();
        const int before = kMayBeginInWord ? offset_of_scales() : 0;
        ++slice, left = tiles, offset += warps * kSpanBytes;
        if constexpr (kPiece == 4) rows_left += rows;
        from += warps * kSpanBytes - rows * Index{params.row_bytes};
        const int step =
            kMayBeginInWord ? offset_of_scales() - before : (warps << params.words_log) * 4;
        scale_from += step - rows * params.scale_row;
        if (kMayBeginInWord) scale_bytes = bytes_of_scales();
      }
    }
    stage = stage == (kStages - 1) * kBytes ? 0 : stage + kBytes;
    commit_copies();
  }

 private:
  // Copies a tile word by word, where rows are not whole pieces: lanes that follow one another take one row.
  __device__ __forceinline__ void copy_words() const {
    static_assert(kAnyIsFinite && !Tiling<kParts>::kMayBeGated);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileN; i += kRows)
#pragma unroll
      for (int first = 0; first < kSpanBytes; first += 4 * kLanes) {
        const int row = i + lane / kLanes, at = first + lane % kLanes * 4;
        if (at < kSpanBytes && offset + first < params.row_bytes && row < rows_left)
          copy_first<4>(ring + stage + Rows::place(row, at),
                        from + i * Index{params.row_bytes} + first, 4);
      }
  }

  // Copies kCopiesOfScales words of a tile's scales for each lane.
  __device__ __forceinline__ void copy_scales(int copy_from) const {
    const int lane = threadIdx.x % 32;
    const int bytes = kMayBeginInWord ? scale_bytes : bytes_of_scales();
#pragma unroll
    for (int copy = 0; copy < kCopiesOfScales; ++copy) {
      const int i = copy_from + copy;
      if (kHasShift ? i < 1 << params.words_log : lane + 32 * i < kTileN << params.words_log) {
        const int first = i * ((kHasShift ? kTileN : 32) >> params.words_log);
        const int row = first + (lane >> (params.words_log + kHasShift));
        const bool is_second = row >= kTileN / 2, exists = kPiece == 16 || row < rows_left;
        uint8_t* const to = ring + stage + kWeightBytes + (lane + 32 * i) * 4;
        const char* const from =
            scale_from + first * params.scale_row + (is_second ? tiling.extra_of_scales() : 0);
        copy_first<4>(to, from, exists ? bytes : 0);
      }
    }
  }

  // The byte offset, in a row of scales, of the word that this lane copies for the span of `slice`.
  __device__ __forceinline__ int offset_of_scales() const {
    const int span = slice * Team::warps(params) + Team::place(params, threadIdx.x / 32);
    const int word = kMayBeginInWord
                         ? span >> params.spans_log << params.words_log >> params.odd_rows
                         : span << params.words_log;
    return (word + (threadIdx.x & ((1 << params.words_log) - 1))) * 4;
  }
  // How many bytes of it exist. Past the last group a scale must be finite, because 0 times NaN is NaN.
  __device__ __forceinline__ int bytes_of_scales() const {
    const int left = params.scale_row + before_row() - offset_of_scales();
    return kMayBeginInWord ? min(max(left, 0), 4) : left > 0 ? 4 : 0;
  }
  // How many bytes of the first word belong to the previous row, for the row that this lane copies.
  __device__ __forceinline__ int before_row() const {
    const int row = static_cast<int>(threadIdx.x % 32) >> (params.words_log + kHasShift);
    return kMayBeginInWord ? (row & params.odd_rows) * 2 : 0;
  }
};

// Shared memory of a warp: its ring, then the terms of a tile. Behind that of all warps lies the x that they
// stage, and then their partial sums.
template <Format kFormat, Scales kScales, typename Rows, int kStages>
struct WarpMemory {
  static constexpr int kTerms =
      kStages * Pipeline<kFormat, kScales, Rows, Parts::kNone, kStages>::kBytes;
  static constexpr bool kHasTerms = kScales != Scales::kByRow && !go_into_operand(kScales);
  static constexpr int kTermBytes = kFormat == Format::kAffine ? 8 : 4;
  static constexpr int kBytes =
      kTerms + (kHasTerms ? kTileN * groups_of(kScales, Rows::kBlocks) * kTermBytes : 0);
};

// The byte selector that takes a scale or shift of 16 or 32 bits, `at` bytes into its row, out of its word. Without
// branches, so that terms are made beside the first products: 16 bits, from either half, become the upper half.
__device__ __forceinline__ uint32_t select_of(const Params& params, int at) {
  return params.scale_log == 2 ? 0x3210 : at & 2 ? 0x3244 : 0x1044;
}
__device__ __forceinline__ float value_in(const uint8_t* word, uint32_t select, Dtype dtype) {
  const uint32_t bits = __byte_perm(*reinterpret_cast<const uint32_t*>(word), 0, select);
  return dtype == Dtype::kF16 ? float_of_bits(bits >> 16, Dtype::kF16) : __uint_as_float(bits);
}

// The terms of a tile that lane l makes: those of pairs l, l + 32, .. of a row and a block (or half of one).
template <typename Term, int kTerms>
struct LaneTerms {
  static constexpr int kCount = kTerms / 32;
  Term of[kCount];
};

// Makes a lane's terms from a tile's copied scales. before: from scales_before; unit: that of a table's entries.
template <Scales kScales, int kBits, int kBlocks, typename Term>
__device__ __forceinline__ auto terms_of_tile(const Params& params, int before,
                                              const uint8_t* scales, float unit) {
  constexpr bool kHasShift = std::is_same_v<Term, float2>;
  constexpr int kGroups = groups_of(kScales, kBlocks);
  LaneTerms<Term, kTileN * kGroups> terms;
  const int lane = threadIdx.x % 32, log = kGroups > kBlocks ? 0 : params.group_log;
  const int row_bytes = 4 << params.words_log;
  const int at = (lane % kGroups >> log << params.scale_log) + before;
  const uint8_t* const row = scales + lane / kGroups * (kHasShift ? 2 : 1) * row_bytes;
  const auto make = [&](auto&& term) {
#pragma unroll
    for (int i = 0; i < terms.kCount; ++i)
      terms.of[i] = term(row + 32 / kGroups * i * (kHasShift ? 2 : 1) * row_bytes);
  };
  if constexpr (kHasShift) {
    const uint32_t select = select_of(params, at);
    make([&](const uint8_t* of_row) {
      const uint8_t* const word = of_row + (at & ~3);
      return terms_of(params.affine, value_in(word, select, params.scale.dtype),
                      value_in(word + row_bytes, select, params.shift.dtype), mid_code(kBits));
    });
  } else {
    const Dtype dtype = params.scale.dtype;
    const uint32_t select = select_of(params, at);
    if (params.scale_log == 0) [[unlikely]]
      make([&](const uint8_t* of_row) { return float_of_byte(of_row[at], dtype) * unit; });
    else
      make([&](const uint8_t* of_row) {
        return value_in(of_row + (at & ~3), select, dtype) * unit;
      });
  }
  return terms;
}

}  // namespace jaxgemv::cuda::stream
