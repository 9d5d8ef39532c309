// Vectors of AVX-512 F, BW, VL, DQ and VNNI, for the instruction sets that have them. Under the rule of
// kernels.h: internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../common/unroll.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(32)));

constexpr int kLookupSize = 16;

// Intrinsics are used in their masked forms, since gcc 12 sees an uninitialised operand in the plain ones.
inline Floats lookup(Floats table, Ints index) {
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, (__m512)table);
}

template <int kSize>
inline Floats lookup(const float* table, Ints index) {
  const __m512i i = (__m512i)index;
  const auto of_32 = [&](const float* half) {
    return _mm512_maskz_permutex2var_ps(0xffff, _mm512_loadu_ps(half), i,
                                        _mm512_loadu_ps(half + kLanes));
  };
  if constexpr (kSize <= kLanes) {
    return (Floats)_mm512_maskz_permutexvar_ps(0xffff, i, _mm512_loadu_ps(table));
  } else if constexpr (kSize == 32) {
    return (Floats)of_32(table);
  } else if constexpr (kSize == 64) {
    const __mmask16 is_upper = _mm512_test_epi32_mask(i, _mm512_set1_epi32(32));
    return (Floats)_mm512_mask_blend_ps(is_upper, of_32(table), of_32(table + 32));
  } else {
    const __m512i place = _mm512_and_si512(i, _mm512_set1_epi32(kSize - 1));
    return (Floats)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, place, table, 4);
  }
}

inline Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
}

inline Shorts widen_to_shorts(const char* from) {
  return (Shorts)_mm256_maskz_cvtepi8_epi16(0xffff, _mm_loadu_si128((const __m128i*)from));
}

inline Ints gather_words(const uint8_t* from, const uint8_t* places) {
  const __m512i bytes = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128((const __m128i*)from));
  return (Ints)_mm512_shuffle_epi8(bytes, _mm512_loadu_si512(places));
}

inline float sum_of(Floats value) { return _mm512_reduce_add_ps((__m512)value); }

inline Ints load_words(const uint8_t* from) { return (Ints)_mm512_loadu_si512(from); }

inline Ints load_words(const uint8_t* from, int64_t count) {
  return (Ints)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from);
}

constexpr int kSliceBits = 8;

inline Ints dot(Ints sum, Ints codes, Ints slices) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)slices);
}

// Transposes squares of 4 x 4 lanes, and then the squares themselves.
inline void transpose(Ints (&square)[kLanes]) {
  __m512i* v = (__m512i*)square;
  __m512i t[kLanes];
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(0xffff, v[i], v[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, v[i], v[i + 1]);
  }
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; i += 4) JAXGEMV_UNROLL
  for (int j = 0; j < 2; ++j) {
    v[i + 2 * j] = _mm512_maskz_unpacklo_epi64(0xff, t[i + j], t[i + j + 2]);
    v[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[i + j], t[i + j + 2]);
  }
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; i += 8) JAXGEMV_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[i + j] = _mm512_maskz_shuffle_i32x4(0xffff, v[i + j], v[i + j + 4], 0x88);
    t[i + j + 4] = _mm512_maskz_shuffle_i32x4(0xffff, v[i + j], v[i + j + 4], 0xdd);
  }
  JAXGEMV_UNROLL
  for (int j = 0; j < 8; ++j) {
    v[j] = _mm512_maskz_shuffle_i32x4(0xffff, t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_maskz_shuffle_i32x4(0xffff, t[j], t[j + 8], 0xdd);
  }
}

// In words of 16 bits: table[words[i] % 128], with bit 7 of the word as sign.
inline __m512i magnitudes_of(__m512i words, const uint16_t (&table)[128]) {
  const auto of_64 = [&](const uint16_t* half) {
    return _mm512_maskz_permutex2var_epi16(~0u, _mm512_loadu_si512(half), words,
                                           _mm512_loadu_si512(half + 32));
  };
  const __mmask32 is_upper = _mm512_test_epi16_mask(words, _mm512_set1_epi16(64));
  const __m512i magnitude = _mm512_mask_blend_epi16(is_upper, of_64(table), of_64(table + 64));
  const __m512i sign =
      _mm512_and_si512(_mm512_maskz_slli_epi16(~0u, words, 8), _mm512_set1_epi16(INT16_MIN));
  return _mm512_or_si512(magnitude, sign);
}

// In words of 16 bits: to[i] = table[(words[i] >> shift) % 32], and 0 where `chosen` has no bit.
inline void lookup_words(Ints words, int shift, const uint16_t (&table)[32], uint32_t chosen,
                         uint16_t* to) {
  const __m512i index = _mm512_maskz_srli_epi16(~0u, (__m512i)words, static_cast<unsigned>(shift));
  const __m512i found = _mm512_maskz_permutexvar_epi16(chosen, index, _mm512_loadu_si512(table));
  _mm512_storeu_si512(to, found);
}

// The same for float8, with a table of magnitudes.
inline void lookup_words(Ints words, int shift, const uint16_t (&table)[128], uint32_t chosen,
                         uint16_t* to) {
  const __m512i index = _mm512_maskz_srli_epi16(~0u, (__m512i)words, static_cast<unsigned>(shift));
  _mm512_storeu_si512(to, _mm512_maskz_mov_epi16(chosen, magnitudes_of(index, table)));
}

constexpr bool kConvertsF16 = true;

inline Floats load_f16(const char* from) {
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
}

constexpr bool kCanSpread = true;

inline Ints shuffle_bytes(Ints v, Ints places) {
  return (Ints)_mm512_shuffle_epi8((__m512i)v, (__m512i)places);
}
inline Ints multiply_low(Ints a, Ints b) {
  return (Ints)_mm512_mullo_epi16((__m512i)a, (__m512i)b);
}
inline Ints multiply_high(Ints a, Ints b) {
  return (Ints)_mm512_mulhi_epu16((__m512i)a, (__m512i)b);
}

// VBMI is newer than VNNI: only some of these files are compiled with it.
#if defined(__AVX512VBMI__)
constexpr bool kCanMultishift = true;

// Moves an octet to each 64 bits, and each of its codes to a byte.
template <int kBits>
inline Ints multishift(Ints words) {
  struct Places {
    alignas(64) uint8_t octet[64], shift[64];
    constexpr Places() : octet(), shift() {
      for (int i = 0; i < 64; ++i)
        octet[i] = static_cast<uint8_t>((i / 8 * kBits + i % 8) % 64),
        shift[i] = static_cast<uint8_t>(i % 8 * kBits);
    }
  };
  static constexpr Places kPlaces;
  const __m512i octets =
      _mm512_maskz_permutexvar_epi8(~0ull, _mm512_load_si512(kPlaces.octet), (__m512i)words);
  return (Ints)_mm512_maskz_multishift_epi64_epi8(~0ull, _mm512_load_si512(kPlaces.shift), octets);
}
#else
constexpr bool kCanMultishift = false;

template <int kBits>
inline Ints multishift(Ints words) {
  return words;
}
#endif

constexpr int kTileRows = 8, kTileVectors = 2;

}  // namespace
}  // namespace jaxgemv::cpu
