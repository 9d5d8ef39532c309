// Which kernel is the fastest, of those that support a call. All numbers: one H200, the shapes and
// the tables of docs/cuda-notes.md, `python -m bench`.
#pragma once

#include <algorithm>
#include <limits>

#include "../kernel.h"

namespace jaxgemv::cuda {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

constexpr bool has_integers(const Problem& problem) { return problem.format == Format::kAffine; }

// For 33 to 64 rows of float32 direct decodes the weights eight times.
constexpr bool has_integers_and_few_columns(const Problem& problem) {
  return has_integers(problem) && (problem.x != Dtype::kF32 || problem.M <= 32);
}

// wgmma_any does as much for 32 columns of x as for few; a row of float32 is two.
constexpr bool has_many_columns(const Problem& problem) {
  return problem.M * (problem.x == Dtype::kF32 ? 2 : 1) > 16;
}

constexpr bool has_odd_rows(const Problem& problem) { return problem.K % kOctet != 0; }

// Groups for which direct and mma_any have to make terms in the middle of their 128 codes.
constexpr bool has_small_groups(const Problem& problem) {
  return problem.group % 128 != 0 && problem.group < problem.K;
}

// The fast case of direct: one mma for a product, and 32 codes of a group side by side in a lane.
constexpr bool has_integers_and_16_bit_x_and_large_groups(const Problem& problem) {
  return has_integers(problem) && problem.x != Dtype::kF32 && !has_small_groups(problem);
}

constexpr bool has_groups_of_64(const Problem& problem) { return problem.group % 64 == 0; }

// x of a tile of direct, times norm, is made anew for every 16 rows of the weights.
constexpr bool has_short_rows_of_integers_and_16_bit_x(const Problem& problem) {
  return has_integers_and_16_bit_x_and_large_groups(problem) && problem.K <= 2048;
}
constexpr bool has_short_rows_of_integers_and_bf16_x(const Problem& problem) {
  return has_short_rows_of_integers_and_16_bit_x(problem) && problem.x == Dtype::kBF16;
}

// What others are slow with or refuse, and fma takes as it takes all.
constexpr bool has_small_groups_in_even_rows(const Problem& problem) {
  return has_small_groups(problem) && !has_odd_rows(problem);
}
constexpr bool has_16_bit_x_and_small_groups_or_odd_rows(const Problem& problem) {
  return problem.x != Dtype::kF32 && (has_small_groups(problem) || has_odd_rows(problem));
}
constexpr bool has_16_bit_x_and_small_groups_and_few_rows(const Problem& problem) {
  return problem.N <= 512 && has_16_bit_x_and_small_groups_or_odd_rows(problem);
}

// Of which direct has several warps share a row, or not its fast case.
constexpr bool has_long_or_odd_rows(const Problem& problem) {
  return problem.K > 2048 || problem.K % 128 != 0;
}

// stream has a CTA for 16 rows of the weights.
constexpr bool has_many_tiles(const Problem& problem) { return problem.batch * problem.N >= 512; }

// mma has one warp for a stretch of a row.
constexpr bool has_long_rows(const Problem& problem) {
  return problem.K >= 1024 && problem.N * problem.K >= Index{10} << 20;
}

// wgmma_tma makes an image of x first, and then reads faster than wgmma and stream do.
constexpr bool is_large(const Problem& problem) { return problem.N * problem.K >= Index{48} << 20; }
// Others have an image too, or read the weights twice; or are wgmma.
constexpr bool is_quite_large(const Problem& problem) {
  return problem.N * problem.K >= Index{24} << 20;
}
constexpr bool is_quite_large_with_one_group(const Problem& problem) {
  return is_quite_large(problem) && problem.group >= problem.K;
}

// The most rows of x for which gemm is faster than XLA's product with the weights that `dequantize` has
// made, and 0 where it is never. Below a number of weights it takes as long as for more; and longer for
// widths other than 2, 3, 4 and float8, for tables and for groups of 16; and XLA's product does for
// float32, or where N or K is odd. "More rows than kernels take".
constexpr Index gemm_rows(const Problem& problem) {
  const Index codes = problem.N * problem.K;
  const bool is_wide = problem.x == Dtype::kF32, is_table = problem.format == Format::kCodebook;
  if (codes < Index{is_wide ? 8 : 15} << 20 || (is_table && problem.bits != 4)) return 0;
  if (is_wide || problem.N % 8 != 0 || problem.K % 8 != 0) return is_table ? 256 : 512;
  const bool is_large = codes >= Index{1} << 25;
  if (problem.group % 32 != 0 && problem.group < problem.K) return is_large ? 128 : 0;
  const bool is_fast = (problem.bits >= 2 && problem.bits <= 4) || is_float8(problem.format);
  return is_large && is_fast ? 256 : is_large || is_fast ? 128 : 0;
}
constexpr bool is_for_gemm(const Problem& problem) { return problem.M <= gemm_rows(problem); }

// Whether `dequantize` is faster than XLA's loop, which takes as long to write float32, and is part of
// the product for small matrices. "More rows than kernels take".
constexpr bool is_for_dequantize(Index codes, Dtype x) {
  return x != Dtype::kF32 && codes >= Index{1} << 22;
}

inline constexpr OperandSet kNorm = OperandSet::of(Operand::kNorm);
inline constexpr OperandSet kEpilogue = OperandSet::of(Operand::kActivation, Operand::kResidual);

inline constexpr Crossover kCrossovers[] = {
    // Against direct: "One and two rows of any format".
    {"fma", 0, 1, 1, 1'000'000},
    {"fma", 0, 1, 1, 1 << 20, has_small_groups_in_even_rows},
    {"fma", 0, 1, 2, 1 << 20, has_16_bit_x_and_small_groups_or_odd_rows},
    {"fma", 0, 1, 4, 5 << 20, has_16_bit_x_and_small_groups_and_few_rows},
    // Against all others: "Small matrices".
    {"direct", 0, 1, 64, 1 << 20, has_integers},
    // Of tables and float8: half as many, unless terms are few.
    {"direct", 0, 1, 64, 1 << 19},
    {"direct", 0, 1, 64, 1 << 20, has_groups_of_64},
    // Against stream, which takes a microsecond longer with parts: "Parts in direct".
    {"direct", 0, 1, 16, 1 << 22, has_short_rows_of_integers_and_bf16_x, kNorm},
    {"direct", 0, 1, 16, 1 << 21, has_short_rows_of_integers_and_16_bit_x, kNorm},
    {"stream", 0, 1, 16, 1 << 22, has_short_rows_of_integers_and_16_bit_x, kNorm},
    {"direct", 0, 1, 16, 1 << 22, has_short_rows_of_integers_and_16_bit_x, kEpilogue},
    // Against stream, wgmma and wgmma_any: "Boxes of weights".
    {"wgmma_tma", 4, 9, 64, kAnyRows, is_quite_large, kNorm},
    {"wgmma_tma", 4, 9, 64, kAnyRows, is_large},
    // Against wgmma: "What the L2 keeps".
    {"wgmma_tma", 4, 17, 64, kAnyRows, is_quite_large},
    {"wgmma_tma", 8, 17, 64, kAnyRows, is_quite_large_with_one_group},
    // Against mma, mma_any and wgmma_any: "The streaming kernel", M = 1 to 64; "Normal numbers for tensor cores".
    {"stream", 2, 1, 24, kAnyRows, has_many_tiles},
    {"stream", 2, 25, 48, 24 << 20, has_many_tiles},
    {"stream", 2, 49, 64, 8 << 20, has_many_tiles},
    {"stream", 4, 1, 16, kAnyRows, has_many_tiles},
    {"stream", 8, 1, 16, kAnyRows, has_many_tiles},
    // Against direct, mma and mma_any: "One and two rows of any format".
    {"fma", 0, 1, 1, kAnyRows, has_small_groups_in_even_rows},
    {"fma", 0, 1, 2, kAnyRows, has_16_bit_x_and_small_groups_or_odd_rows},
    {"fma", 0, 1, 1, 5 << 20, has_long_or_odd_rows},
    // Against wgmma, mma and mma_any: "Small matrices".
    {"direct", 0, 1, 16, 5 << 20, has_integers},
    // Of tables and float8, where stream refuses.
    {"direct", 0, 1, 64, 5 << 19},
    // Against mma_any: "Many rows on Hopper". Up to 8 rows it stages more zeros than x.
    {"wgmma", 0, 9, 64},
    // Against mma and mma_any: "Small matrices".
    {"direct", 0, 1, 64, 5 << 20, has_integers_and_few_columns},
    // Against wgmma_any: "Boxes of weights".
    {"wgmma_tma", 0, 9, 64, kAnyRows, is_quite_large},
    // Against mma_any: "Many rows of every width".
    {"wgmma_any", 0, 9, 64, kAnyRows, has_many_columns},
    // Where that is not.
    {"stream", 2, 25, 64, kAnyRows, has_many_tiles},
    // Against XLA's product with the dequantised matrix: "More than 64 rows".
    {"gemm", 0, 65, kAnyRows, kAnyRows, is_for_gemm},
    // Against direct: "One and two rows of any format".
    {"mma", 0, 1, 8, kAnyRows, has_long_rows},
    // Against mma and mma_any: "Small matrices".
    {"direct", 0, 1, 64, 1 << 24, has_integers_and_16_bit_x_and_large_groups},
    // Against mma_any: "Every width". stream, of few tiles, with parts that the ones above refuse.
    {"stream", 0, 1, 16},
    {"mma", 0, 1, 8},
    {"mma_any", 0, 1, kAnyRows},
    {"transposed", 0, 1, kAnyRows},
};

// 64: above, XLA's product with the dequantised matrix is faster ("Many rows"). Parts inside a
// kernel, `python -m bench.parts` ("Four nouns"): with a norm always, since XLA would make x float32
// of it, which is slower than 16 bits; an activation or a residual alone only for one and two rows,
// since the plain kernels for more have more warps.
// A global scale alone is inside for as many rows as stream has an epilogue for: outside it is a kernel of XLA's.
inline constexpr Index kMostRows = 64, kFusedRows = 64, kEpilogueRows = 2, kGlobalScaleRows = 8;

// The same where weights may be rounded, on GPUs of compute capability `major`; whatever M is.
constexpr Index most_rounded_rows(int major, const Problem& problem) {
  return std::max(kMostRows, major == 9 ? gemm_rows(problem) : 0);
}

}  // namespace jaxgemv::cuda
