// How the wgmma_tma kernel lays out x and its shared memory.
#pragma once

#include <algorithm>

#include "../common/hopper.cuh"
#include "../mma_any/results.cuh"

namespace jaxgemv::cuda::wgmma_tma {

using namespace hopper;
using namespace mma_any;

// The record of a quad, 128 k, of x: for each of 16 registers of operand B 16 bytes of every column, as in
// mma_any; behind them the columns' sums. No power of two: a row of x has one, behind its last quad.
JAXGEMV_HD constexpr int sums_at(int columns) { return columns * kQuadK * 2; }
JAXGEMV_HD constexpr int record_bytes(int columns) {
  return (sums_at(columns) + columns * 4 + 127) & ~127;
}

// For up to kMostColumns columns of x. Four groups of four warps multiply, each 64 rows of the weights;
// what these are to find in shared memory two more threads ask for. Weights come as boxes: 128 bytes of 64
// rows, swizzled.
template <Format kFormat, int kWidth, int kMostColumns>
struct Shape {
  static constexpr int kBits = kWidth;
  using C = Decoder<kFormat, kBits>;
  static constexpr float kWorth = C::kWorth;  // of a sum
  static constexpr bool kHasGlobalScale = !C::kHasShift;
  static constexpr int kColumns = kMostColumns;
  static constexpr int kRowTiles = 1, kRows = kTileN;
  static constexpr int kWarps = 16, kGroups = 4, kConsumers = 32 * kWarps,
                       kThreads = kConsumers + 128;
  static constexpr int kQuads = 8 / kBits, kUnitK = kQuads * kQuadK;  // of a box
  static constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * 128;
  // In shared memory, which they fill: boxes of each group, and quads of x, which all groups share.
  static constexpr int kSlots = kColumns > 32 ? 3 : 4, kXStages = kColumns > 32 ? 6 : 8;
  // Groups that share K: each meets stages of x of its own.
  static constexpr int kMostDeep = kXStages / kQuads >= kGroups ? kGroups : 2;
  static constexpr int kX = kGroups * kSlots * kBoxBytes;  // where these begin
  static constexpr int kRecordBytes = record_bytes(kColumns),
                       kScales = kX + kXStages * kRecordBytes;
  // Of a warp: scales and shifts as they come, twice, and the terms that are made of them.
  static constexpr int kRawBytes = 32 * 8, kTermBytes = 32 * 16;
  static constexpr int kScaleBytes = 2 * kRawBytes + kTermBytes;
  // The sums of a quad run beside the products of the next, where there are registers for both.
  static constexpr int kAccumulators = kColumns > 16 ? 1 : 2;
  // The swizzle has its multiples of 1024 bytes.
  static constexpr int shared_bytes(int across, int deep) {
    return 1024 + std::max(kScales + kWarps * kScaleBytes, sums_bytes<Shape>(across, deep));
  }
};

}  // namespace jaxgemv::cuda::wgmma_tma
