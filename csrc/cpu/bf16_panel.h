// Many rows of bfloat16 x by dot products of pairs of bfloat16, which are twice as many in a vector as
// float32 (panel.h). Under the rule of isa/kernels.h: internal linkage.
//
// Codes are bfloat16 as they are. Products of a group are summed in float32, at most those of a
// panel, and then scaled, so that no product is rounded; x behind the ends of a group is zero. The
// instruction takes subnormal numbers for zero: x that has some, or sums that might be no float32, is
// left to f32_panel.h.
#pragma once

#include "isa/avx512bf16.h"
#include "segments.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kChunkPairs = kChunkCodes / 2;  // as many as lanes
// How far ahead x is asked for when it is packed, whose rows are several streams.
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

  // Chunks are multiplied once for each group in them.
  static bool supports(const Problem& p, const Operands& o) {
    return p.group >= min_of(kChunkCodes, p.K) && C::suits(p, o);
  }

  static constexpr int kWords = kChunkPairs, kOfRows = 1;  // sums of x
  using Sum = Floats;
  static Floats dot(Floats sum, Ints w, Ints x) { return dot_pairs(sum, w, x); }
  // Not one after the other to acc, which is the larger sum.
  static Floats add(Floats acc, Floats sum, Floats scale, Floats offset, const float* of_rows,
                    Index) {
    return acc + (sum * scale + offset * of_rows[0]);
  }

  // False where an element is out of range.
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

  // panel[pair][lane], codes.
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

  // Both codes of a pair, each in the lowest bits of half a lane with anything above it.
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
