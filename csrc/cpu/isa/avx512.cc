// AVX-512.
#include "avx512.h"

#include "kernels.h"

namespace jaxgemv::cpu {
constinit const Isa kAvx512 = make_isa("avx512");
}
