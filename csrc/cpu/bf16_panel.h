// Many rows of bfloat16 x by dot products of pairs of bfloat16: a vector holds twice as many as of
// float32 (panel.h). Under the rule of isa/kernels.h: internal linkage.
//
// Codes are exact in bfloat16. The products of a group, or of its part in a panel, are summed in float32 and
// then scaled, so that no product is rounded; x outside of the group is taken as zero. The
// instruction treats subnormal numbers as zero: x that has some, or whose sums might overflow, is
// left to f32_panel.h.
#pragma once

#include "isa/avx512bf16.h"
#include "segments.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kChunkPairs = kChunkCodes / 2;  // as many as lanes
// How many bytes ahead x is prefetched while it is packed: its rows are several streams.
constexpr Index kAheadBytes = 1024;

template <typename C>
struct Bf16Panel : SegmentPanel<C, Bf16Panel<C>> {
  using Base = SegmentPanel<C, Bf16Panel<C>>;
  using typename Base::Scratch;
  static constexpr const char* kName = "bf16_panel";
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kBF16; }
  static constexpr int kBits = C::kBits, kPanelSteps = kPanelCodes / 2;

  // A chunk is multiplied once for each group in it, so that narrow groups would take long.
  static bool supports(const Problem& p, const Operands& o) {
    return p.group >= min_of(kChunkCodes, p.K) && C::suits(p, o);
  }

  static constexpr int kWords = kChunkPairs, kOfRows = 1;  // sums of x
  using Sum = Floats;
  static Floats dot(Floats sum, Ints w, Ints x) { return dot_pairs(sum, w, x); }
  // The two terms are added first, and then to acc, which is larger.
  static Floats add(Floats acc, Floats sum, Floats scale, Floats offset, const float* of_rows,
                    Index) {
    return acc + (sum * scale + offset * of_rows[0]);
  }

  // False if an element of x is out of range.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    XPairs pairs(C::kOrder.code);
    Base::pack_segments(x, m0, m1, pairs, out);
    return pairs.in_range();
  }

  static void pack_segment(const X& x, Index k0, const Segment& segment, Index m0, Index m1,
                           XPairs& pairs, float* of_rows, float* words) {
    const Problem& p = x.p;
    const Index chunks = segment.chunks(), first = segment.first() * kChunkCodes;
    const char* all = static_cast<const char*>(x.o.x);
    for (Index m = m0; m < m1; ++m) {
      const Index row = (x.slice * p.M + m) * p.K + k0;
      Floats sum = {};
      for (Index i = 0, at = first; i < chunks; ++i, at += kChunkCodes) {
        const char* from = all + (row + at) * size_of(Dtype::kBF16);
        __builtin_prefetch(from + kAheadBytes);
        sum += pairs.pack(from, segment.begin - at, segment.end - at,
                          words + (i * p.M + m) * kChunkPairs);
      }
      of_rows[m] = sum_of(sum);
    }
  }

  // panel[pair][lane] <- the codes of a chunk, as pairs of bfloat16.
  static void unpack_chunk(const C& codes, const Ints* words, const Scratch& s, Index, int chunk,
                           int lane) {
    unpack_pairs(codes, words, s.panel + chunk * kChunkPairs * kRowBlock + lane,
                 std::make_integer_sequence<int, kChunkPairs>());
  }

  template <int... kPair>
  static void unpack_pairs(const C& codes, const Ints* words, float* panel,
                           std::integer_sequence<int, kPair...>) {
    Ints word[kBits];  // in registers, as in f32_panel.h
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    (store_floats(panel + kPair * kRowBlock, (Floats)value(codes, halves<kPair>(word))), ...);
  }

  static Ints value(const C& codes, Ints halves) {
    if constexpr (C::kIsLookedUp) {
      return lookup_halves(halves, codes.table);
    } else {
      constexpr int32_t kMask = (1 << kBits) - 1;
      const Floats low = to_floats(halves & kMask), high = to_floats(halves >> 16 & kMask);
      return (Ints)low >> 16 | (Ints)high;
    }
  }

  // Both codes of a pair, each in the lowest bits of one half of a lane, with anything above it.
  template <int kPair>
  static Ints halves(const Ints (&word)[kBits]) {
    constexpr int kLow = C::kOrder.first(kPair) * kBits, kHigh = kLow + C::kOrder.kApart * kBits;
    if constexpr (kHigh == kLow + 16 && kLow % 32 < 16)
      return code_at<kBits, kLow>(word);
    else
      return join_halves(code_at<kBits, kLow>(word), code_at<kBits, kHigh, 16>(word));
  }

  static void multiply(const Problem& p, const Scratch& s, Index k0, Index m0, Index m1, XRows& x) {
    Base::multiply_segments(p, s, k0, m0, m1, x);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
