// AVX2 without VNNI.
#include "avx2.h"

namespace jaxgemv::cpu {
namespace {

// Words of 16 bits, because the same product of bytes would saturate.
constexpr int kSliceBits = 16;

inline Ints dot(Ints sum, Ints codes, Ints slices) {
  return sum + (Ints)_mm256_madd_epi16((__m256i)codes, (__m256i)slices);
}

}  // namespace
}  // namespace jaxgemv::cpu

#include "kernels.h"

namespace jaxgemv::cpu {
constinit const Isa kAvx2 = make_isa("avx2");
}
