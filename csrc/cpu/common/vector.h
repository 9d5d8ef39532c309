// What all kernels do with vectors. An instruction set (isa/) defines Floats and Ints of kLanes
// lanes before this file comes. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "../../gemv.h"

namespace jaxgemv::cpu {
namespace {

inline Index min_of(Index a, Index b) { return a < b ? a : b; }
inline Index max_of(Index a, Index b) { return a > b ? a : b; }

// `count` rounded up to whole vectors.
inline Index padded(Index count) { return ceil_div(count, Index{kLanes}) * kLanes; }

inline Ints load_ints(const void* from) {
  Ints value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

// Prefetches bytes to the second-level cache, and returns where they end. To be used for a few lines at a time,
// between other work: with more on their way than the first level has room for, the processor waits.
inline const uint8_t* prefetch(const uint8_t* from, Index bytes) {
  const uint8_t* end = from + bytes;
  for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
  return end;
}

// Keeps a value in a register. gcc would load it again for each use: three rows of x took twice as long.
inline Ints in_register(Ints value) {
#if defined(__x86_64__)
  __asm__("" : "+v"(value));
#endif
  return value;
}

inline Floats load_floats(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_floats(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }

inline Floats broadcast(float value) { return value - Floats{}; }  // + 0 would cost an instruction

inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

// Lane j <- j.
inline Ints lane_numbers() {
  Ints lane;
  for (int j = 0; j < kLanes; ++j) lane[j] = j;
  return lane;
}

// `yes` in lanes where `mask` is -1, `no` where it is 0.
inline Floats select(Ints mask, Floats yes, Floats no) {
  return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

}  // namespace
}  // namespace jaxgemv::cpu
