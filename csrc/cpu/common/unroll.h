#pragma once

// Before loops over registers: what is left a loop would keep them in memory.
#if defined(__clang__)
#define JAXGEMV_UNROLL _Pragma("unroll")
#else
#define JAXGEMV_UNROLL _Pragma("GCC unroll 64")
#endif
