// Powers of two that bring numbers into the range of fp16, or of fixed point.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxgemv::cuda {

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The exponent s for which 2^s brings numbers with these magnitude bits, and smaller ones, to just
// under 2^log.
template <typename X>
__device__ __forceinline__ int normal_exponent(uint32_t bits, int log) {
  // A number is under 2^(biased + 1 - bias).
  if constexpr (std::is_same_v<X, __half>) return log + 14 - static_cast<int>(bits >> 10);
  return min(log + 126 - static_cast<int>(bits >> (std::is_same_v<X, float> ? 23 : 7)), 126);
}

}  // namespace jaxgemv::cuda
