// Any number of rows of int8 x, any width and any group: exact integer dot products, which are scaled once a
// group, or if the weights have no scale, summed over all of K in 32 bits. Under the rule of isa/kernels.h: internal
// linkage.
#pragma once

#include "segments.h"

namespace jaxgemv::cpu {
namespace {

// Bits that a code takes of a word: those of a slice, or without a dot product of slices the whole word.
constexpr int kPartBits = kSliceBits > 0 ? kSliceBits : 32;
constexpr int kParts = 32 / kPartBits;

// Words of kParts codes each: part `part` of a chunk's word `word` is its code place(word, part).
template <int kBits>
struct Codes<Format::kAffine, kBits, XKind::kParts> : AffineCodes<kBits> {
  using AffineCodes<kBits>::AffineCodes;
  static constexpr bool kAligned = 8 % kBits == 0;
  static constexpr int kSteps = kPartBits / kBits;  // words that one of memory gives

  static constexpr int place(int word, int part) {
    if (!kAligned) return word * kParts + part;
    return word / kSteps * (32 / kBits) + part * kSteps + word % kSteps;
  }
  template <int kWord>
  static Ints at(const Ints (&words)[kBits]) {
    constexpr uint32_t kMask = (1u << kBits) - 1;
    constexpr uint32_t kOnes = kParts == 4 ? 0x01010101 : kParts == 2 ? 0x00010001 : 1;
    if constexpr (kAligned)
      return words[kWord / kSteps] >> (kWord % kSteps * kBits) &
             static_cast<int32_t>(kOnes * kMask);
    else
      return join<kWord>(words, std::make_integer_sequence<int, kParts>());
  }

 private:
  template <int kWord, int... kPart>
  static Ints join(const Ints (&words)[kBits], std::integer_sequence<int, kPart...>) {
    return ((code_at<kBits, (kWord * kParts + kPart) * kBits, kPart * kPartBits>(words) &
             static_cast<int32_t>(((1u << kBits) - 1) << (kPart * kPartBits))) |
            ...);
  }
};

template <typename C>
struct Int8Panel : SegmentPanel<C, Int8Panel<C>> {
  using Base = SegmentPanel<C, Int8Panel<C>>;
  using typename Base::Scratch;
  static constexpr const char* kName = "int8_panel";
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kInt8Parts;
  static constexpr bool takes(Dtype x) { return x == Dtype::kI8; }
  static constexpr int kBits = C::kBits, kWords = kChunkCodes / kParts;
  static constexpr int kPanelSteps = kPanelCodes / kParts;
  static constexpr int kOfRows = 2;  // a scale, and the sum of x times that

  static bool supports(const Problem&, const Operands&) { return true; }

  using Sum = Ints;
  static Ints dot(Ints sum, Ints w, Ints x) {
    return kSliceBits > 0 ? jaxgemv::cpu::dot(sum, w, x) : sum + w * x;
  }
  static Floats add(Floats acc, Ints sum, Floats scale, Floats offset, const float* of_rows,
                    Index rows) {
    return acc + (to_floats(sum) * of_rows[0] * scale + offset * of_rows[rows]);
  }

  static bool pack(const X& x, Index m0, Index m1, float* out) {
    Base::pack_segments(x, m0, m1, C::kMid, out);
    return true;
  }
  static void pack_segment(const X& x, Index k0, const Segment& segment, Index m0, Index m1,
                           const float&, float* of_rows, float* words) {
    const Problem& p = x.p;
    const Index first = segment.first() * kChunkCodes;
    for (Index m = m0; m < m1; ++m) {
      const int8_t* from = x.int8_row(m) + k0;
      int32_t sum = 0;
      for (Index i = 0; i < segment.chunks(); ++i) {
        const Index at = first + i * kChunkCodes;
        int32_t part[kChunkCodes] = {};
        for (Index k = max_of(at, segment.begin); k < min_of(at + kChunkCodes, segment.end); ++k)
          sum += part[k - at] = from[k];
        int32_t to[kWords] = {};
        for (int word = 0; word < kWords; ++word)
          for (int j = 0; j < kParts; ++j)
            to[word] |= static_cast<int32_t>(static_cast<uint32_t>(part[C::place(word, j)])
                                                 << (32 - kPartBits) >>
                                             (32 - kPartBits) << (j * kPartBits));
        __builtin_memcpy(words + (i * p.M + m) * kWords, to, sizeof(to));
      }
      const float scale = x.int8_scale(m, k0 + segment.begin);
      of_rows[m] = scale;
      of_rows[m + Base::size_of_rows(p)] =
          p.y == Dtype::kI32 ? __builtin_bit_cast(float, sum) : static_cast<float>(sum) * scale;
    }
  }

  // panel[word][lane] <- the codes of a chunk, kParts in a word.
  static void unpack_chunk(const C&, const Ints* words, const Scratch& s, Index, int chunk,
                           int lane) {
    unpack_words(words, s.panel + chunk * kWords * kRowBlock + lane,
                 std::make_integer_sequence<int, kWords>());
  }
  template <int... kWord>
  static void unpack_words(const Ints* words, float* panel, std::integer_sequence<int, kWord...>) {
    Ints word[kBits];  // in registers, as in f32_panel.h
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    (store_floats(panel + kWord * kRowBlock, (Floats)C::template at<kWord>(word)), ...);
  }

  // The exact product: sums stay integers, and so are the sum of x and the zero, which comes as `offset`.
  struct Exact {
    static constexpr int kWords = kChunkCodes / kParts;
    using Sum = Ints;
    static Ints dot(Ints sum, Ints w, Ints x) { return Int8Panel::dot(sum, w, x); }
    static Floats add(Floats acc, Ints sum, Floats, Floats zero, const float* of_rows, Index rows) {
      const auto x_sum = __builtin_bit_cast(int32_t, of_rows[rows]);
      return (Floats)((Ints)acc + sum - (Ints)zero * x_sum);
    }
  };

  static void multiply(const Problem& p, const Scratch& s, Index k0, Index m0, Index m1, XRows& x) {
    p.y == Dtype::kI32 ? Base::template multiply_segments<Exact>(p, s, k0, m0, m1, x)
                       : Base::multiply_segments(p, s, k0, m0, m1, x);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
