// AVX2 without VNNI.
#include "avx2.h"

namespace jaxgemv {
namespace {

// Of bytes it would saturate.
constexpr int kDigitBits = 16;

inline Ints dot(Ints sum, Ints codes, Ints digits) {
  return sum + (Ints)_mm256_madd_epi16((__m256i)codes, (__m256i)digits);
}

}  // namespace
}  // namespace jaxgemv

#include "kernel.h"

namespace jaxgemv {
const Level kAvx2 = make_level<Gemv>("avx2", 256);
}
