// AVX2 with VNNI in 256-bit vectors, as processors for laptops have it.
#include "avx2.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kSliceBits = 8;

inline Ints dot(Ints sum, Ints codes, Ints slices) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)slices);
}

}  // namespace
}  // namespace jaxgemv::cpu

#include "kernels.h"

namespace jaxgemv::cpu {
constinit const Isa kAvxVnni = make_isa("avxvnni", kAvx2, kDots);
}
