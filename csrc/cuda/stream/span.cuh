// A warp's span of a row: its length, how many warps have registers for theirs, x of it as operands, and
// the products of a tile with it.
#pragma once

#include <array>
#include <type_traits>

#include "pipeline.cuh"
#include "scaled.cuh"
#include "x_int8.cuh"
#include "x_normed.cuh"
#include "x_pairs.cuh"

namespace jaxgemv::cuda::stream {

// Kernels for few rows of x without parts have no code for a residual alone; for many rows it is little code.
JAXGEMV_HD constexpr bool takes_residual(Parts parts, int rows) {
  return parts != Parts::kNone || rows > 2;
}

// A warp's span of a row, and how many warps have registers enough for their x.
template <Format kFormat, int kBits, int kRows, Scales kScales, int kUnits, Parts kParts,
          bool kByWords = false>
struct SpanShape {
  // With a norm and more than two rows, x has twice as many operands.
  static constexpr bool kTwice = kParts == Parts::kNormAndEpilogue && kRows > 2;
  // With 8-bit codes, 256 bytes are two groups of 128. With 4-bit ones they are faster for one row
  // of x, and slower for two (H200). Tables take registers.
  static constexpr bool kIsTable = kFormat == Format::kCodebook;
  // With rare widths spans have 512 codes, or 256 where blocks are small.
  static constexpr int kSpanBytes = is_rare(kBits) ? (kUnits == 4 ? 64 : 32) * kBits
                                    : kBits == 8 || (kBits == 4 && kRows == 1 && !kIsTable) ? 256
                                                                                            : 128;
  // For 1, 2 and 4 units a lane: the warps that share 64 K registers without spilling any on sm_80 and sm_90a. (On
  // sm_100 and sm_120 four to twenty bytes: of tables with parts, int2 in groups of 32 and 64, int4 with a norm and a
  // scale a row, and int8; on sm_80 four of int5 by words.) Fewer units are more blocks and sums.
  static constexpr std::array<int, 3> warps() {
    constexpr bool kPlain = kParts == Parts::kNone;
    if (is_rare(kBits)) return {16, 16, 16};
    if (go_into_operand(kScales)) return kRows <= 8 ? std::array{16, 16, 16} : std::array{8, 8, 8};
    if (kRows <= 2 && kIsTable) return {16, 16, 16};
    if (kRows <= 2 && kBits == 4) return {8, kPlain ? 16 : 12, 16};
    if (kRows <= 2 && kBits == 8) return {12, 12, 16};
    if (kRows <= 2)
      return {kPlain ? 12 : 8, kPlain && !kByWords ? 16 : 12,
              kParts == Parts::kNormAndEpilogue ? 12 : 16};
    if (kBits != 4 || kTwice) return {8, 8, 8};
    return kRows == 8 ? std::array{8, 12, 16} : std::array{8, 8, kPlain && !kIsTable ? 12 : 8};
  }
  static constexpr int kMaxWarps = warps()[kUnits / 2];
  // Whether a span's scales may begin inside of a word: only the widest blocks, which have large groups, need it, and
  // kernels for one row of x have no register for it.
  static constexpr bool kMayBeginInWord = kByWords || (kRows > 1 && kUnits == (kIsTable ? 2 : 4));
  // Tiles in a warp's ring. More than two are no faster, and make whatever is not yet asked for wait longer
  // (H200, int4, M = 1; 2, 3 and 4 tried, docs/cuda-notes.md). With 8 warps four are as many bytes.
  static constexpr int kStages = go_into_operand(kScales) && kRows > 8 ? 4 : 2;
};

// x in registers: one or two rows as bytes (XInt8), of any type; more rows as pairs, and all where codes take scales
// with them. Integer codes are exact in x's type, whichever it is; other codes, and x * norm, are fp16.
template <typename C, typename Element, typename X, int kRows, Scales kScales, int kSpanBytes,
          int kUnits, Parts kParts>
using PairsSpan = std::conditional_t<
    kParts == Parts::kNormAndEpilogue, XNormed<C, kRows, kSpanBytes, kUnits>,
    XPairs<C, Element, X, kRows, kSpanBytes, kUnits, kScales == Scales::kByHalf>>;
template <Format kFormat, typename X, Parts kParts>
using ElementOf =
    std::conditional_t<kFormat == Format::kAffine && kParts != Parts::kNormAndEpilogue, X, __half>;
template <Format kFormat, int kBits, typename X, int kRows, Scales kScales, int kSpanBytes,
          int kUnits, Parts kParts, typename Element = ElementOf<kFormat, X, kParts>>
using Span = std::conditional_t<
    go_into_operand(kScales),
    PairsSpan<ScaledCodes, __half, X, kRows, kScales, kSpanBytes, kUnits, kParts>,
    std::conditional_t<kRows <= 2,
                       XInt8<kFormat, kBits, kRows, kSpanBytes, kUnits,
                             kParts == Parts::kNormAndEpilogue, kScales == Scales::kByHalf>,
                       PairsSpan<PairCodes<kFormat, kBits, Element>, Element, X, kRows, kScales,
                                 kSpanBytes, kUnits, kParts>>>;

// y += a tile's products with a span of x. With one scale a row the row's term is applied later.
template <Scales kScales, typename Rows, typename Term, typename Span, typename PutTerms>
__device__ __forceinline__ void multiply(const uint8_t* weights, const Term* terms,
                                         PutTerms&& put_terms, const Span& xs,
                                         float (&y)[Span::kResults]) {
  constexpr int kParts = groups_of(kScales, 1);  // groups of a block
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < Span::kBlocks; ++i) {
    typename Span::Units w;
    Rows::load(w, weights, i);
    float v[Span::kResults];
    xs.template dot<kScales != Scales::kByRow>(w, i, v);
    if (kScales != Scales::kByRow && i == 0) put_terms(), __syncwarp();  // as late as possible
#pragma unroll
    for (int e = 0; e < Span::kResults; ++e) {
      if constexpr (kScales == Scales::kByRow) {
        y[e] += v[e];
        continue;
      }
      const int row = g + 8 * Span::row(e), part = kParts == 1 ? 0 : Span::half(e);
      const Term of = terms[(row * Span::kBlocks + i) * kParts + part];
      if constexpr (std::is_same_v<Term, float2>)
        y[e] = fmaf(of.x, v[e], fmaf(of.y, xs.sum_of(e, i), y[e]));
      else
        y[e] = fmaf(of, v[e], y[e]);
    }
  }
}

}  // namespace jaxgemv::cuda::stream
