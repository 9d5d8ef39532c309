// For how many rows of x the kernels are used at all, and where XLA is faster: what Python asks before it makes a call.
// Numbers are of an H100 and an H200; names are of sections of docs/cuda-notes.md.
#pragma once

#include <algorithm>

#include "../conditions.h"
#include "../kernel.h"
#include "image/image.h"

namespace jaxgemv::cuda {

// Rows of the weights whose K codes are no whole octets.
constexpr bool has_odd_rows(const Problem& problem) { return problem.K % kOctet != 0; }

constexpr bool has_groups_of_16(const Problem& problem) {
  return !has_one_group(problem) && problem.group % 32 != 0;
}
// Groups that end inside the 128 codes which direct and mma_any take at once, and whose terms they have to make in
// between.
constexpr bool has_small_groups(const Problem& problem) {
  return !has_one_group(problem) && problem.group % 128 != 0;
}
// The fast case of direct: one mma for a product, and 32 codes of a group side by side in a lane.
constexpr bool is_fast_in_direct(const Problem& problem) {
  return all<has_integers, has_16_bit_x, none<has_small_groups>>(problem) && problem.K % 32 == 0;
}

// Codes that stand for floats, beside float32 x.
constexpr bool has_wide_floats(const Problem& problem) {
  return all<has_x<Dtype::kF32>, none<has_integers>>(problem);
}

// Rows of the weights that are whole 16 bytes, as tensor copies want them, and most kernels of stream.
constexpr bool has_whole_pieces(const Problem& problem) {
  return problem.K * problem.bits % 128 == 0;
}

// Weights that take longer to decode, above 64 rows of x.
constexpr bool is_slow_to_decode(const Problem& problem) {
  return any<has_table, has_small_groups>(problem);
}

// Rows of the weights and of x that are whole 16 bytes, and groups of whole 32.
constexpr bool is_for_gemm_tma(const Problem& problem) {
  return has_whole_pieces(problem) && problem.K * size_of(problem.x) % 16 == 0 &&
         !has_groups_of_16(problem);
}

// Rows of scales that are whole 8 bytes if scales have 16 bits: gemm_tma loads so many at once in a thread.
constexpr bool has_eights_of_scales(const Problem& problem) {
  return problem.K % (4 * problem.group) == 0;
}

// The most rows of x for which gemm_tma is faster than XLA's product with the weights that `dequantize` has made: as
// many as give each SM one tile, or many more for large matrices. "Decoded by warps of their own", "One tile after
// another".
constexpr Index gemm_tma_rows(const Problem& problem) {
  constexpr Index kTileRows = 128, kTileColumns = 256, kSms = 132;
  const Index codes = problem.N * problem.K;
  if (has_x<Dtype::kF32>(problem))  // a stage has half as many codes to decode
    return is_slow_to_decode(problem) || problem.K < 2048 || problem.N < 2048 ? 512 : 2048;
  const bool is_small = all<has_integers, has_small_groups>(problem);
  const bool is_slow = has_table(problem) || (is_small && !has_eights_of_scales(problem));
  if (problem.K < 512) return problem.N >= 32768 ? 512 : is_slow ? 128 : 256;
  // Pairs of CTAs decode half as much each. Below 8192 rows of the weight there are too few for 512 of x.
  if (is_slow)
    return codes < Index{15} << 20 ? 128 : problem.N < 8192 && codes < Index{48} << 20 ? 256 : 1024;
  if (problem.N < 2048) return 256;
  if (codes >= Index{1} << 24) return 2048;
  if (is_small) return kTileColumns;
  return kTileColumns * std::clamp<Index>(kSms * kTileRows / problem.N, 1, 8);
}

// The same for gemm and gemm_tma together, and 0 where they are never faster. Below some number of weights, or of their
// rows, they take as long as for more, and gemm takes longer for tables and small groups; XLA's product takes longer
// for float32, or where N or K is no multiple of 8. Both take groups of whole 16. "More rows than kernels take".
constexpr Index gemm_rows(const Problem& problem) {
  if (!image::has_sizes(problem) || (!has_one_group(problem) && problem.group % 16 != 0)) return 0;
  const Index codes = problem.N * problem.K;
  const bool is_wide = has_x<Dtype::kF32>(problem), is_table = has_table(problem);
  const Index least = is_wide ? 2 << 20 : 3 << 20;
  if (codes < least || problem.N < 1024 || (is_table && problem.bits != 4)) return 0;
  if (is_for_gemm_tma(problem)) return gemm_tma_rows(problem);
  if (is_slow_to_decode(problem) && codes < least * (problem.bits == 1 ? 6 : 2)) return 0;
  if (is_wide || problem.N % 8 != 0 || problem.K % 8 != 0) return is_table ? 256 : 512;
  if (has_groups_of_16(problem)) return codes >= Index{1} << 25 ? 128 : 0;
  return codes < Index{15} << 20 || problem.K < 512 ? 128 : 256;
}
constexpr bool is_for_gemm(const Problem& problem) { return problem.M <= gemm_rows(problem); }

// The same for tables of 16 with scales of one byte, an even number per row, which gemm_tma decodes in pairs if they
// are E2M1 (mxfp4 and nvfp4) and x has 16 bits; with float32 x only for groups of 16, the others being as all: "Decoded
// by warps of their own".
constexpr Index pairs_rows(const Problem& problem) {
  const Index codes = problem.N * problem.K;
  const bool is_wide = has_x<Dtype::kF32>(problem);
  const bool fits = has_table(problem) && problem.bits == 4 && problem.K % 64 == 0 &&
                    (problem.group == 16 || (problem.group == 32 && !is_wide));
  if (!fits || codes < Index{is_wide ? 2 : 3} << 20 || problem.N < 1024) return 0;
  if (is_wide) return 512;
  if (problem.K < 512) return problem.N >= 32768 ? 512 : 256;
  if (codes >= Index{1} << 24) return problem.N < 16384 ? 2048 : 1024;
  if (problem.N < 2048 || problem.N > 8192) return 256;
  return problem.K < 2048 ? 384 : 512;
}
constexpr bool is_for_pairs(const Problem& problem) { return problem.M <= pairs_rows(problem); }

// The most rows of x for which direct is faster than XLA's product with small matrices of weights: a limit to the
// products in all, M * N * K. "More than 64 rows" in "Small matrices".
constexpr Index direct_rows(const Problem& problem) {
  const Index codes = problem.N * problem.K;
  const bool has_halves = has_table(problem) && problem.group == 16;
  if (has_odd_rows(problem) || (has_groups_of_16(problem) && !has_halves) ||
      (has_table(problem) && problem.bits != 4) || codes > Index{5} << 19)
    return 0;
  const Index products = has_x<Dtype::kF32>(problem)  ? 20
                         : is_fast_in_direct(problem) ? 144
                         : has_float8(problem)        ? 64
                                                      : 48;
  return std::min<Index>((products << 20) / codes, 256);
}
constexpr bool is_for_direct(const Problem& problem) { return problem.M <= direct_rows(problem); }

// Whether `dequantize` is faster than XLA's loop, which takes as long to write float32, and is part of
// the product for small matrices. "More rows than kernels take".
constexpr bool is_for_dequantize(Index codes, Dtype x) {
  return x != Dtype::kF32 && codes >= Index{1} << 22;
}

// kMostRows: above so many rows of x a weight may be written first: "More rows than kernels take". The others are for
// parts inside a kernel, `python -m bench.parts` ("Four nouns"): with a norm always, since XLA would make x float32 of
// it, which is slower than 16 bits; an activation, or a norm that may be rounded, only for one and two rows, since the
// plain kernels for more have more warps. These take a residual.
// A global scale alone is always inside, since outside it is a kernel of XLA's, and beside an activation or a residual
// for as many rows as stream has an epilogue for.
inline constexpr Index kMostRows = kExactRows, kFusedRows = kExactRows, kEpilogueRows = 2,
                       kResidualRows = 16, kGlobalScaleRows = 8;

// From how many rows of x on an activation, and a norm that may be rounded, are inside the kernel again, on GPUs of
// compute capability `major`: where wgmma_tma is the kernel, which takes a microsecond for them where XLA takes two.
// "Few rows of x".
constexpr Index epilogue_from(int major, const Problem& problem) {
  if (major != 9 || problem.bits < 3 || !has_whole_pieces(problem)) return kNoLimit;
  if (all<has_codes<48>, has_rows<14336>>(problem)) return 9;
  return all<has_codes<24>, has_rows<8192>>(problem) ? 17 : kNoLimit;
}

// The most rows of x that kernels take where weights may be rounded, on GPUs of compute capability `major`; whatever M
// is.
constexpr Index most_rounded_rows(int major, const Problem& problem, bool has_one_byte_scale) {
  if (major != 9) return kMostRows;
  return std::max({kMostRows, direct_rows(problem), gemm_rows(problem),
                   has_one_byte_scale ? pairs_rows(problem) : 0});
}

// The most codes for which XLA's own loop, one small kernel that decodes, multiplies and sums, is faster than any of
// ours with one row of x. With few codes what counts is when a kernel may begin: "Where XLA's own loop is faster".
constexpr Index loop_codes(const Problem& problem) {
  constexpr Index kMost = 1 << 22;
  if (has_groups_of_16(problem))
    return problem.N < 512 ? kMost : problem.N < 896 ? 1 << 20 : 1 << 19;
  if (has_wide_floats(problem)) return 6 << 20;
  const bool is_for_stream = problem.bits <= 4 && problem.N > 1024;
  return !is_for_stream ? kMost : has_table(problem) ? 3 << 20 : 5 << 19;
}

// The most rows of x for which XLA's own loop is faster; whatever M is.
constexpr Index loop_rows(const Problem& problem) {
  const Index codes = problem.N * problem.K;
  // XLA makes two kernels of such calls, and writes the weight to memory.
  if (8 % problem.bits != 0 || problem.N == 1 || problem.K >= 1 << 14) return 0;
  // For our kernels XLA pads such rows in every call, which takes as long as the loop does for three rows of x.
  if (has_float8(problem) && problem.K % 4 != 0 && codes > 1 << 19) return codes > 1 << 22 ? 3 : 4;
  if (codes > loop_codes(problem)) return 0;
  return std::clamp<Index>((2 << 20) / std::max<Index>(codes, 1), 1, kMostRows);
}

}  // namespace jaxgemv::cuda
