// AVX-512 F, BW, VL, DQ.
#include <immintrin.h>

#include <cstdint>

namespace jaxgemv {
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

}  // namespace
}  // namespace jaxgemv

#include "kernel.h"

namespace jaxgemv {
const Level kAvx512 = make_level("avx512");
}
