// How a call is cut into tasks.
#pragma once

#include <algorithm>

#include "table.h"

namespace jaxgemv::cpu {

// Bytes of weights that are worth a task of their own, for one row of x.
constexpr Index kTaskBytes = 64 << 10;
// Bytes of weights that are worth another thread, for one row of x: to wake it takes the caller
// 6 us, and it comes late. (An AMD EPYC, two cores: docs/cpu-notes.md, "Every width in int8_dot".)
constexpr Index kThreadBytes = 96 << 10;
// Values of x from which on threads share the packing.
constexpr Index kPieceValues = 32 << 10;
// Values of x that are packed at a time, and at least so many rows, for which weights are worth decoding. (An AMD
// EPYC, two cores: docs/cpu-notes.md, "Any number of rows".)
constexpr Index kPackedValues = 1 << 20, kPackedRows = 128;
// Tasks for each thread: threads that start late or run slowly take fewer. (2 to 32 were the same or
// slower: docs/cpu-notes.md, "Threads".)
constexpr Index kTasksPerThread = 8;

// Tasks with neighbouring numbers are neighbours in memory: [slice][part of the rows][column of
// codes]. A product has one column. How the transposed product is cut depends on shapes alone, and so does the
// order in which its sums are added up, by whichever thread finishes the last part of a column.
struct Schedule {
  Index codes, columns;    // codes of y in a column; columns
  Index part_rows, parts;  // rows of a part, of the weight or of y; parts
  Index rows;              // rows of all parts together
  Index tasks;             // tasks of all slices together
  Index sums = 0;          // floats of a tile's sums, transposed only
  Index x_pieces;          // pieces of a slice of x, each packed by one thread
  Index workers;           // threads for which there is enough work

  Schedule(const Problem& p, Index threads) {
    p.transposed ? divide_transposed(p) : divide_product(p, threads);
    columns = ceil_div(p.K, codes), parts = ceil_div(rows, part_rows);
    tasks = columns * parts * p.batch;
    const Index bytes = p.N * row_bytes(p.K, p.bits) * p.M * p.batch;
    workers = std::clamp<Index>(bytes / kThreadBytes, 1, threads);
    x_pieces = p.transposed || p.M * p.K < kPieceValues ? 1 : std::min(workers, p.M);
  }

  Index slice_of(Index task) const { return task / (columns * parts); }
  // The number of a task's column, counted over all slices.
  Index place_of(Index task) const { return slice_of(task) * columns + task % columns; }
  Index part_of(Index task) const { return task / columns % parts; }

  Tile tile_of(Index task) const {
    const Index n0 = part_of(task) * part_rows;
    return {n0, std::min(n0 + part_rows, rows), task % columns * codes, codes};
  }

 private:
  void divide_product(const Problem& p, Index threads) {
    codes = p.K, rows = p.y_width();
    const Index share = p.N / rows;  // rows of the weight for one of y
    const Index bytes = std::max<Index>(1, row_bytes(p.K, p.bits) * p.M) * share;
    const Index least = std::max(kTaskBytes / bytes, rows / (threads * kTasksPerThread));
    const Index block = kRowBlock / share;
    part_rows = std::max<Index>(1, ceil_div(least, block)) * block;
  }

  // Each part of N writes sums of its own, (M, codes) floats that `finish` adds up: so a part reads
  // at least kTaskBytes of weights, and there are at most kTiles parts and 256 / M of them.
  void divide_transposed(const Problem& p) {
    // Sums of a tile for a row of x, and tiles for as many threads as gain by them.
    constexpr Index kMinCodes = 256, kMaxCodes = kMaxTileCodes, kSums = 4096, kTiles = 64;
    const Index most = std::clamp(kSums / p.M, kMinCodes, kMaxCodes);
    codes = ceil_div(std::min(most, p.K), kTileUnit) * kTileUnit;
    rows = p.N, sums = p.M * codes;
    const Index bytes = codes * p.bits / 8 * p.M;
    const Index least = std::max({kTaskBytes / bytes, ceil_div(p.N * ceil_div(p.K, codes), kTiles),
                                  p.N * p.M / 256, Index{1}});
    part_rows = ceil_div(least, kDecoded) * kDecoded;
  }
};

}  // namespace jaxgemv::cpu
