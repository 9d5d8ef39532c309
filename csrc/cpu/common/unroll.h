#pragma once

// To be put before loops over values in registers: a loop that is not unrolled would keep them in memory.
#if defined(__clang__)
#define JAXGEMV_UNROLL _Pragma("unroll")
#else
#define JAXGEMV_UNROLL _Pragma("GCC unroll 64")
#endif
