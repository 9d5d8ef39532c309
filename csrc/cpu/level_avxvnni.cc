// AVX2 with VNNI, as processors for laptops have it.
#include "avx2.h"

namespace jaxgemv {
namespace {

constexpr int kDigitBits = 8;

inline Ints dot(Ints sum, Ints codes, Ints digits) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)digits);
}

}  // namespace
}  // namespace jaxgemv

#include "kernel.h"

namespace jaxgemv {
const Level kAvxVnni = make_level<Gemv>("avxvnni", 256);
}
