// The image of x as callers see it: how many bytes it takes. No device code.
#pragma once

#include "../../gemv.h"

namespace jaxgemv::cuda::image {

// Sizes for which 32 bits are enough.
constexpr bool has_sizes(const Problem& problem) {
  return problem.K < (1 << 19) && problem.N < (1 << 30) && problem.M < (1 << 20) &&
         problem.N * problem.K * problem.bits < Index{1} << 36;
}

// Columns that a row of x takes: float32, and what a norm makes that is not to be rounded, are the sum of two fp16.
constexpr int parts_of(Dtype x, bool has_norm) { return x == Dtype::kF32 || has_norm ? 2 : 1; }
inline int parts_of(const Problem& problem, const Operands& operands) {
  return parts_of(problem.x, operands.norm.data != nullptr && !problem.round_norm);
}

// Columns of a CTA. With up to kInsideColumns each CTA makes the image of x itself, in shared memory.
inline constexpr int kInsideColumns = 2, kMostColumns = 64;

constexpr int kQuadK = 128, kMetaWords = 12;
constexpr int kRecordBytes = kQuadK * 2 + kMetaWords * 4;  // of 128 k and a column

// Bytes of a column of the image, with room for whole units of every width.
constexpr Index column_bytes(Index K) { return ceil_div(K, 4 * kQuadK) * 4 * kRecordBytes; }

// Bytes of the image of a row of x, where a slice has `rows` of them; 0 if CTAs make it in shared memory.
constexpr Index least_image_row_bytes(Index rows, Index K, int parts) {
  return rows * parts <= kInsideColumns ? 0 : column_bytes(K) * parts;
}

// Whether wgmma_tma takes so many rows of x; and the columns of its image, used or not. One row is stream's, except for
// float32 beside tables and float8.
constexpr bool has_tma_rows(const Problem& problem) {
  const bool is_wide = problem.x == Dtype::kF32 && problem.format != Format::kAffine;
  return problem.M >= (is_wide ? 1 : 2) && problem.M <= 64;
}
constexpr Index tma_columns(Index columns) {
  return columns <= 16   ? 16
         : columns <= 32 ? 32
                         : ceil_div(columns, Index{kMostColumns}) * kMostColumns;
}

// Bytes of the image of a row of x in a call, with room for wgmma_tma's columns too.
constexpr Index image_row_bytes(const Problem& problem, int parts) {
  if (!has_tma_rows(problem)) return least_image_row_bytes(problem.M, problem.K, parts);
  const Index bytes = column_bytes(problem.K) * tma_columns(problem.M * parts);
  return ceil_div(ceil_div(bytes, problem.M), Index{16}) * 16;
}

}  // namespace jaxgemv::cuda::image
