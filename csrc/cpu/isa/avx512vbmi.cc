// AVX-512 with VBMI.
#include "avx512.h"
#include "kernels.h"

namespace jaxgemv::cpu {
constinit const Isa kAvx512Vbmi = make_isa("avx512vbmi", kAvx512, kDots);
}
