// Vectors of AVX2, FMA and F16C, for the instruction sets that have them, each of which defines its own
// `dot`. Under the rule of kernels.h: internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../common/unroll.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(16)));

constexpr int kLookupSize = 8;

inline Floats lookup(Floats table, Ints index) {
  return (Floats)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
}

template <int kSize>
inline Floats lookup(const float* table, Ints index) {
  const __m256i i = (__m256i)index;
  const auto of_8 = [&](const float* part) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(part), i);
  };
  if constexpr (kSize <= kLanes) {
    return (Floats)of_8(table);
  } else if constexpr (kSize == 2 * kLanes) {
    const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));  // by bit 3
    return (Floats)_mm256_blendv_ps(of_8(table), of_8(table + kLanes), is_upper);
  } else {
    const __m256i place = _mm256_and_si256(i, _mm256_set1_epi32(kSize - 1));
    return (Floats)_mm256_i32gather_ps(table, place, 4);
  }
}

inline Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
}

inline Shorts widen_to_shorts(const char* from) {
  return (Shorts)_mm_cvtepi8_epi16(_mm_loadu_si64(from));
}

inline Ints gather_words(const uint8_t* from, const uint8_t* places) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
  return (Ints)_mm256_shuffle_epi8(bytes, _mm256_loadu_si256((const __m256i*)places));
}

inline float sum_of(Floats value) {
  const __m128 four =
      _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Ints load_words(const uint8_t* from) {
  return (Ints)_mm256_loadu_si256((const __m256i*)from);
}

inline Ints load_words(const uint8_t* from, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  return (Ints)_mm256_maskload_epi32((const int*)from, mask);
}

inline void transpose(Ints (&square)[kLanes]) {
  __m256i* v = (__m256i*)square;
  __m256i t[kLanes];
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  JAXGEMV_UNROLL
  for (int i = 0; i < kLanes; i += 4) JAXGEMV_UNROLL
  for (int j = 0; j < 2; ++j) {
    v[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
    v[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
  }
  JAXGEMV_UNROLL
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm256_permute2x128_si256(v[j], v[j + 4], 0x20);
    t[j + 4] = _mm256_permute2x128_si256(v[j], v[j + 4], 0x31);
  }
  JAXGEMV_UNROLL
  for (int j = 0; j < kLanes; ++j) v[j] = t[j];
}

constexpr bool kConvertsF16 = true;

inline Floats load_f16(const char* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}

constexpr bool kCanSpread = true, kCanMultishift = false;

template <int kBits>
inline Ints multishift(Ints words) {
  return words;
}

inline Ints shuffle_bytes(Ints v, Ints places) {
  return (Ints)_mm256_shuffle_epi8((__m256i)v, (__m256i)places);
}
inline Ints multiply_low(Ints a, Ints b) {
  return (Ints)_mm256_mullo_epi16((__m256i)a, (__m256i)b);
}
inline Ints multiply_high(Ints a, Ints b) {
  return (Ints)_mm256_mulhi_epu16((__m256i)a, (__m256i)b);
}

constexpr int kTileRows = 6, kTileVectors = 2;

}  // namespace
}  // namespace jaxgemv::cpu
