// AVX-512.
#include "avx512.h"
#include "kernel.h"

namespace jaxgemv {
const Level kAvx512 = make_level<Gemv>("avx512", 512);
}
