// AVX2, FMA and F16C.
#include <immintrin.h>

#include <cstdint>

namespace jaxgemv {
namespace {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

constexpr int kLookupSize = 8;

inline Floats lookup(Floats table, Ints index) {
  return (Floats)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
}

inline Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
}

inline Ints gather_words(const uint8_t* from, const uint8_t* places) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
  return (Ints)_mm256_shuffle_epi8(bytes, _mm256_loadu_si256((const __m256i*)places));
}

}  // namespace
}  // namespace jaxgemv

#include "kernel.h"

namespace jaxgemv {
const Level kAvx2 = make_level("avx2");
}
