// Fixed-point x: multiples of a power of two, the quantum, that a run of codes shares. Under the
// rule of isa/kernels.h: internal linkage.
#pragma once

#include "convert.h"

namespace jaxgemv::cpu {
namespace {

// Codes in a run: few enough that sums of their products fit into 32 bits, and that the elements of x, being
// near each other, are not too different for one quantum.
constexpr int kRunCodes = 512;
// The most that an element may be off, relative to itself: 16 roundings of float32. If one would be off by
// more, the values of x do not suit fixed point.
constexpr float kFixedError = 0x1p-20f;

// The bits of the largest magnitude in x[0, count).
inline uint32_t largest_magnitude(const float* x, Index count) {
  uint32_t largest = 0;
  for (Index i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of_f32(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Rounds to the nearest integer. What is added is below one half, so that no sum is rounded up to the next one.
template <typename Int>
inline Int nearest(float value) {
  return static_cast<Int>(value + __builtin_copysignf(0x1.fffffep-2f, value));
}

// Not 0 if an integer that is `error` away from `scaled`, which is x in quanta, holds x less well than kFixedError.
inline int32_t is_off(float x, float scaled, float error) {
  return (__builtin_fabsf(error) > kFixedError * __builtin_fabsf(scaled)) |
         ((scaled == 0) != (x == 0));
}

}  // namespace
}  // namespace jaxgemv::cpu
