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

constexpr int kLookupSize = 16;

// Intrinsics in their masked forms: in the plain ones gcc 12 sees an uninitialised operand.
inline Floats lookup(Floats table, Ints index) {
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, (__m512)table);
}

inline Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
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

// In squares of 4 x 4 lanes first, then the squares themselves.
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

// Words of 16 bits: to[i] = table[(words[i] >> shift) % 32], and 0 where `chosen` has no bit.
inline void lookup_words(Ints words, int shift, const uint16_t* table, uint32_t chosen,
                         uint16_t* to) {
  const __m512i index = _mm512_maskz_srli_epi16(~0u, (__m512i)words, static_cast<unsigned>(shift));
  const __m512i found = _mm512_maskz_permutexvar_epi16(chosen, index, _mm512_loadu_si512(table));
  _mm512_storeu_si512(to, found);
}

constexpr int kTileRows = 8, kTileVectors = 2;

}  // namespace
}  // namespace jaxgemv::cpu
