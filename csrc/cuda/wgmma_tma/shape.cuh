// How the wgmma_tma kernel lays out x and its shared memory.
#pragma once

#include <algorithm>

#include "../common/hopper.cuh"
#include "../common/scaled.cuh"
#include "../image/results.cuh"

namespace jaxgemv::cuda::wgmma_tma {

using namespace hopper;
using namespace image;

// The record of a quad, 128 k, of x: for each of 16 registers of operand B 16 bytes of every column, as in
// mma_any; behind them sums of the columns, of each of a quad's groups. No power of two: a row of x has one,
// behind its last quad.
//
// Split sums are operand B too, each two numbers of TF32: for two groups 16 bytes of every column, or for one, twice
// the same.
JAXGEMV_HD constexpr int sums_at(int columns, int group, bool split) {
  return columns * (kQuadK * 2 + (split ? group / 2 * 16 : group * 4));
}
JAXGEMV_HD constexpr int record_bytes(int columns, int groups, bool split) {
  return (sums_at(columns, split && groups == 1 ? 2 : groups, split) + 127) & ~127;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A number as the sum of two of TF32, to 2^-23: a tensor core does not see the last 13 bits.
struct TwoTf32 {
  uint32_t high, low;

  __device__ __forceinline__ explicit TwoTf32(float v)
      : high((__float_as_uint(v) + 0x1000) & ~0x1fffu),
        low(__float_as_uint(v - __uint_as_float(high))) {}
};

#endif

// Scales that are part of what is multiplied, so that no group has an end: of one byte, beside E2M1 (scaled.cuh). e4m3
// is for groups of 16, e8m0 for groups of 32; any other scale is applied at the end of its group.
enum class InOperand { kNone, kE4M3, kE8M0 };

// The most bytes that other CTAs of a cluster send to one (gather.cuh).
template <typename S>
JAXGEMV_HD constexpr int sent_bytes(int across) {
  return (S::kColumns + kMostRanks - 1) * across * S::kRows * 4;
}

// For up to kMostColumns columns of x. Four groups of four warps multiply, each 64 rows of the weights; two more
// threads ask for the copies into shared memory. Weights come as boxes of 64 rows: 128 bytes of each, swizzled, or,
// where the width does not divide a byte, a quad of each, not swizzled. kEndCount: ends of groups of codes in a quad,
// or 0: one scale per row, so all products add up.
template <Format kFormat, int kWidth, int kMostColumns, int kEndCount, InOperand kScalesIn>
struct Shape {
  static constexpr int kBits = kWidth, kEnds = kEndCount;
  static constexpr InOperand kInOperand = kScalesIn;
  static constexpr bool kScalesNumbers = kInOperand != InOperand::kNone;
  using C = std::conditional_t<kScalesNumbers, ScaledOctet, Decoder<kFormat, kBits>>;
  // Whether codes lie in a register as OrderOf<true> has them: the image is the same for all that do.
  static constexpr bool kHasPairs = C::kHasShift || kScalesNumbers;
  static constexpr float kWorth = C::kWorth;  // factor of a sum
  static constexpr bool kHasGlobalScale = !C::kHasShift;
  static constexpr int kColumns = kMostColumns;
  static constexpr int kRowTiles = 1, kRows = kTileN;
  static constexpr int kWarps = 16, kGroups = 4, kConsumers = 32 * kWarps,
                       kThreads = kConsumers + 128;
  static constexpr bool kSwizzles = 8 % kBits == 0;
  static constexpr int kQuads = kSwizzles ? 8 / kBits : 1, kUnitK = kQuads * kQuadK;  // per box row
  static constexpr int kBoxRows = 64, kRowBytes = kQuads * kBits * 16;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  // A piece is a run of codes with the same terms: how many a quad has, and a box. kLogLanes: log2 of a piece's lanes,
  // of the 16 that have a quad of x.
  static constexpr int kQuadPieces = std::max(kEnds, 1), kPieces = kQuads * kQuadPieces;
  // How many boxes four pieces take, whose scales are loaded together; and how many a group takes in one turn where
  // groups share K. With few columns it is memory that counts, which likes boxes side by side (docs/cuda-notes.md).
  static constexpr int kFourBoxes = std::max(4 / kPieces, 1);
  static constexpr int kMostTurn = kColumns > 32 && kEnds == 1 && C::kHasShift ? kFourBoxes : 1;
  // Terms are made beside products; with few of these, behind them. (With 64 columns registers do not suffice for all.)
  static constexpr bool kMakesBeside =
      kColumns > 16 && (kColumns <= 32 || (kEnds == 1 && (kBits < 8 || C::kHasShift)));
  static constexpr int kSums = C::kHasShift ? kEnds : 0;  // of a quad of x
  // With 16 columns a thread has eight FFMA for a shift, which take no longer; nor do those of 32 where the second of
  // two pieces would be missing (docs/cuda-notes.md).
  static constexpr bool kSplitsSums = kSums > 0 && kColumns > (kPieces > 1 ? 16 : 32);
  // Pieces whose shifts are begun together, as registers allow.
  static constexpr int kInner = std::min(kPieces, kColumns > 32 && kSplitsSums ? 2 : 4);
  static constexpr int kLogLanes = kEnds < 2 ? 4 : kEnds == 2 ? 3 : 2;
  static constexpr bool kHasTable = C::kTableBytes > 0;
  // Lane t of four has octets 4 t to 4 t + 3 of a quad, or where groups end inside t, t + 4 ..
  static constexpr bool kRuns = kBits != 8 && kEnds < 2 && !kHasTable;
  // Boxes of each group, and quads of x, which all groups share: as many as shared memory has room for.
  static constexpr int kSlots = (kColumns > 32 ? 3 : 4) - kHasTable;
  static constexpr int kXStages = (kHasTable && kColumns > 16) || (kColumns > 32 && kSums > 2) ? 4
                                  : kColumns > 32                                              ? 6
                                                                                               : 8;
  // The most groups that share K: each uses stages of x of its own, of two boxes where a stage goes back a quad later.
  static constexpr int kMostDeep =
      kXStages / (kEnds == 0 ? 2 * kQuads : kQuads) >= kGroups ? kGroups : 2;
  static constexpr int kX = kGroups * kSlots * kBoxBytes;  // where these begin
  static constexpr int kRecordBytes = record_bytes(kColumns, kSums, kSplitsSums),
                       kScales = kX + kXStages * kRecordBytes;
  // How many of four scales, or shifts, a lane loads.
  static constexpr int kNumbers = C::kHasShift ? 4 : 2;
  // Bytes of a warp: scales and shifts as they come, twice, and the terms that are made of them.
  static constexpr int kRawBytes = 32 * 16, kTermBytes = 32 * 16;
  static constexpr int kScaleBytes = 2 * kRawBytes + kTermBytes;
  static constexpr int kTable = kScales + kWarps * kScaleBytes;
  // The sums of a piece are added beside the products of the next, where there are registers for both accumulators.
  static constexpr int kAccumulators = kColumns > 32 || (kColumns > 16 && kEnds < 2) ? 1 : 2;
  static constexpr int shared_bytes(int across, int deep) {
    return std::max(kTable + C::kTableBytes,
                    sums_bytes<Shape>(across, deep) + sent_bytes<Shape>(across));
  }
};

}  // namespace jaxgemv::cuda::wgmma_tma
