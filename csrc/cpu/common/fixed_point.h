// Fixed-point x: multiples of a power of two, the quantum, that a run of codes shares. Under the
// rule of isa/kernels.h: internal linkage.
#pragma once

#include "convert.h"

namespace jaxgemv::cpu {
namespace {

// Codes in a run: sums of their products fit into 32 bits, and elements that are near each other
// are not too different.
constexpr int kRunCodes = 512;
// An element may be off by so much of itself: 16 roundings of float32. Where one would be more, the
// values of x do not suit fixed point.
constexpr float kFixedError = 0x1p-20f;

// The bits of the largest of them.
inline uint32_t largest_magnitude(const float* x, Index count) {
  uint32_t largest = 0;
  for (Index i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of_f32(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// To the nearest integer. What is added is below one half, so that no sum is rounded up to the next.
template <typename Int>
inline Int nearest(float value) {
  return static_cast<Int>(value + __builtin_copysignf(0x1.fffffep-2f, value));
}

// Whether `x` quanta are held well enough by a number that is `error` away.
inline int32_t is_off(float x, float scaled, float error) {
  return (__builtin_fabsf(error) > kFixedError * __builtin_fabsf(scaled)) |
         ((scaled == 0) != (x == 0));
}

}  // namespace
}  // namespace jaxgemv::cpu
