// Loads steps, kTileWords codes of a row of the weight, which are a row of a tile: as 16-bit halves of a vector, in
// an order that is cheap to make. The vectors of avx512bf16.h, with VBMI, have to be included before. Under the rule
// of kernels.h: internal linkage.
#pragma once

#include "../common/vector.h"

namespace jaxgemv::cpu {
namespace {

// The sizes of AMX tiles, which other kernels that multiply whole tiles of weights use too.
constexpr int kTileHeight = 16, kTileBytes = 64, kTileWords = 32;

// Half i of a step is code[i] of it: where codes are parts of words of 16 bits, first those that begin
// words, then their neighbours.
template <int kBits>
struct StepOrder {
  static constexpr bool kOfWords = 4 % kBits == 0;
  static constexpr int kWords = kOfWords ? 2 * kBits : kTileWords;  // that a vector repeats
  uint16_t code[kTileWords], shift[kTileWords];

  constexpr StepOrder() : code(), shift() {
    for (int i = 0; i < kTileWords; ++i) {
      code[i] = static_cast<uint16_t>(i % kWords * (kTileWords / kWords) + i / kWords);
      shift[i] = static_cast<uint16_t>(i / kWords * kBits);
    }
  }
  // The halves that are codes below `end`.
  constexpr uint32_t halves(int64_t end) const {
    uint32_t mask = 0;
    for (int i = 0; i < kTileWords; ++i) mask |= static_cast<uint32_t>(code[i] < end) << i;
    return mask;
  }
};

// The codes of a step, from 4 * kBits bytes and no more, with anything above them.
template <int kBits>
inline Ints load_step(const uint8_t* from) {
  static constexpr StepOrder<kBits> kOrder;
  if constexpr (kBits == 8) {
    return (Ints)_mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)from));
  } else if constexpr (kOrder.kOfWords) {
    __m512i words;
    if constexpr (kBits == 4) {
      words = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128((const __m128i*)from));
    } else if constexpr (kBits == 2) {
      int64_t word;
      __builtin_memcpy(&word, from, sizeof(word));
      words = _mm512_set1_epi64(word);
    } else {
      int32_t word;
      __builtin_memcpy(&word, from, sizeof(word));
      words = _mm512_set1_epi32(word);
    }
    return (Ints)_mm512_maskz_srlv_epi16(~0u, words, _mm512_loadu_si512(kOrder.shift));
  } else {
    // Moves four codes to each 64 bits, and each of these to a half.
    struct Places {
      alignas(64) uint8_t byte[64], bit[64];
      constexpr Places() : byte(), bit() {
        for (int i = 0; i < 64; ++i) {
          byte[i] = static_cast<uint8_t>((i / 8 * kBits / 2 + i % 8) % 64);
          bit[i] =
              static_cast<uint8_t>((i / 8 * kBits % 2 * 4 + i % 8 / 2 * kBits + i % 2 * 8) % 64);
        }
      }
    };
    static constexpr Places kPlaces;
    const __m512i bytes = _mm512_maskz_loadu_epi32((1u << kBits) - 1, from);
    const __m512i fours =
        _mm512_maskz_permutexvar_epi8(~0ull, _mm512_load_si512(kPlaces.byte), bytes);
    return (Ints)_mm512_maskz_multishift_epi64_epi8(~0ull, _mm512_load_si512(kPlaces.bit), fours);
  }
}

// The lowest four bits of codes, and above them whether a code is of the second half of a step.
template <int kBits>
inline Ints with_upper_halves(Ints codes) {
  struct Upper {
    alignas(64) uint16_t bit[kTileWords];
    constexpr Upper() : bit() {
      for (int i = 0; i < kTileWords; ++i) bit[i] = StepOrder<kBits>{}.code[i] / kLanes * 16;
    }
  };
  static constexpr Upper kUpper;
  return (codes & 0x000f000f) | load_ints(kUpper.bit);
}

// The first or the second 16 halves of a vector; lanes_of widens them to lanes.
inline __m256i part_of(__m512i halves, int part) {
  return part == 0 ? _mm512_castsi512_si256(halves)
                   : _mm512_maskz_extracti64x4_epi64(0xf, halves, 1);
}
inline Ints lanes_of(Ints halves, int part) {
  return (Ints)_mm512_maskz_cvtepu16_epi32(0xffff, part_of((__m512i)halves, part));
}

// The bytes of a step, sign-extended to halves; lanes_of_f16 takes halves as float16 and gives lanes.
typedef int16_t Halfwords __attribute__((vector_size(64)));
inline Halfwords load_signed_step(const uint8_t* from) {
  return (Halfwords)_mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256((const __m256i*)from));
}
inline Floats lanes_of_f16(Halfwords halves, int part) {
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, part_of((__m512i)halves, part));
}

inline Floats gather(const float* from, Ints places) {
  return (Floats)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, (__m512i)places, from, 4);
}

// Weights as bfloat16, and if kKeepsRest what they lose. kMayBeInfinite: an infinite weight has lost nothing.
struct Rounded {
  Ints kept = {}, rest = {};

  template <bool kKeepsRest, bool kMayBeInfinite = false>
  static Rounded of(Floats low, Floats high) {
    const auto joined = [](Floats low, Floats high) {
      return (Ints)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    };
    Rounded to = {joined(low, high)};
    if (kKeepsRest)
      to.rest = joined(lost<kMayBeInfinite>(low, lanes_of(to.kept, 0)),
                       lost<kMayBeInfinite>(high, lanes_of(to.kept, 1)));
    return to;
  }
  // The same in both halves, by fewer instructions.
  template <bool kKeepsRest>
  static Rounded twice(Floats weights) {
    const auto rounded = [](Floats value) { return (__m256i)_mm512_cvtneps_pbh((__m512)value); };
    const auto repeated = [](__m256i half) {
      return (Ints)_mm512_maskz_broadcast_i64x4(0xff, half);
    };
    const __m256i kept = rounded(weights);
    Rounded to = {repeated(kept)};
    if (kKeepsRest)
      to.rest =
          repeated(rounded(lost<false>(weights, (Ints)_mm512_maskz_cvtepu16_epi32(0xffff, kept))));
    return to;
  }
  // Half i <- that of number codes[i] % 32.
  template <bool kKeepsRest>
  Rounded at(Ints codes) const {
    const auto found = [&](Ints table) {
      return (Ints)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)codes, (__m512i)table);
    };
    return {found(kept), kKeepsRest ? found(rest) : Ints{}};
  }
  // The same with zeros in halves that the mask lacks.
  Rounded of_halves(uint32_t halves) const {
    return {(Ints)_mm512_maskz_mov_epi16(halves, (__m512i)kept),
            (Ints)_mm512_maskz_mov_epi16(halves, (__m512i)rest)};
  }

 private:
  template <bool kMayBeInfinite>
  static Floats lost(Floats value, Ints kept) {
    const Floats rounded = (Floats)(kept << 16), lost = value - rounded;
    return kMayBeInfinite ? (Floats)((Ints)lost & (value != rounded)) : lost;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
