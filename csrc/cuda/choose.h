// Which kernel is the fastest, of those that support a call. All numbers: one H200, the shapes and
// the tables of docs/cuda-notes.md, `python -m bench`.
#pragma once

#include <limits>

#include "../kernel.h"

namespace jaxgemv::cuda {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

// The fast case of direct: one mma for a product, and 32 codes of a group side by side in a lane.
constexpr bool has_16_bit_x_and_large_groups(const Problem& problem) {
  return problem.x != Dtype::kF32 && (problem.group % 128 == 0 || problem.group >= problem.K);
}

// For 33 to 64 rows of float32 direct decodes the weights eight times.
constexpr bool has_few_columns(const Problem& problem) {
  return problem.x != Dtype::kF32 || problem.M <= 32;
}

// wgmma_any does as much for 32 columns of x as for few; a row of float32 is two.
constexpr bool has_many_columns(const Problem& problem) {
  return problem.M * (problem.x == Dtype::kF32 ? 2 : 1) > 16;
}

// Of a matrix, below which gemm takes as long as for a larger one.
inline constexpr Index kManyCodes = Index{15} << 20;
constexpr bool has_many_codes(const Problem& problem) {
  return problem.N * problem.K >= kManyCodes;
}

inline constexpr Crossover kCrossovers[] = {
    // Against all others: "Small matrices".
    {"direct", 0, 1, 64, 1 << 20},
    // Against mma, mma_any and wgmma, which has no code for 2 bits: "The streaming kernel", M = 1 to 64.
    {"stream", 2, 1, 64},
    {"stream", 4, 1, 16},
    {"stream", 8, 1, 16},
    // Against wgmma, mma and mma_any: "Small matrices".
    {"direct", 0, 1, 16, 5 << 20},
    // Against mma_any: "Many rows on Hopper". Up to 8 rows it stages more zeros than x.
    {"wgmma", 0, 9, 64},
    // Against mma and mma_any: "Small matrices".
    {"direct", 0, 1, 64, 5 << 20, has_few_columns},
    // Against mma_any: "Many rows of every width".
    {"wgmma_any", 0, 9, 64, kAnyRows, has_many_columns},
    // Against XLA's product with the dequantised matrix: "More than 64 rows".
    {"gemm", 0, 65, kAnyRows, kAnyRows, has_many_codes},
    // Against mma and mma_any: "Small matrices".
    {"direct", 0, 1, 64, 1 << 24, has_16_bit_x_and_large_groups},
    // Against mma_any: "Every width".
    {"mma", 0, 1, 8},
    {"mma_any", 0, 1, kAnyRows},
    {"transposed", 0, 1, kAnyRows},
};

// 64: above, XLA's product with the dequantised matrix is faster ("Many rows"). Parts inside a
// kernel, `python -m bench.parts` ("Four nouns"): with a norm always, since XLA would make x float32
// of it, which is slower than 16 bits; an activation or a residual alone only for one and two rows,
// since the plain kernels for more have more warps.
inline constexpr Index kMostRows = 64, kFusedRows = 64, kEpilogueRows = 2;

// The same where weights may be rounded, of so many codes, on GPUs of compute capability `major`: gemm,
// "More than 64 rows".
constexpr Index most_rounded_rows(int major, Index codes, Dtype x) {
  if (major != 9 || codes < kManyCodes) return kMostRows;
  return x == Dtype::kF32 ? 512 : 256;
}

}  // namespace jaxgemv::cuda
