// RMSNorm before the product: x * rsqrt(mean(x^2) + eps) * norm. The factor of a row comes last, at
// the end of the product, so that x is read once; here are the others.
#pragma once

#include "params.cuh"

namespace jaxgemv::cuda {

// The values of norm for entry s of the stack, from k on; without norm all are one.
struct NormValues {
  const char* data;
  Dtype dtype;

  __device__ __forceinline__ NormValues(const Param& norm, Index s, Index k)
      : data(static_cast<const char*>(norm.data)), dtype(norm.dtype) {
    if (data != nullptr) data += (s * norm.stack_stride + k) * size_of(dtype);
  }

  // to[i] = that of k + i, i < kCount.
  template <int kCount>
  __device__ __forceinline__ void load(float (&to)[kCount], int k) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = data == nullptr ? 1.f : cuda::load(data, dtype, k + i);
  }

  // Asks for the lines of `count` values, into the L2.
  __device__ __forceinline__ void prefetch(int k, int count) const {
    if (data != nullptr && count > 0)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(data + k * size_of(dtype)));
  }
};

__device__ __forceinline__ float norm_factor(float squares, Index K, float eps) {
  return rsqrtf(squares / static_cast<float>(K) + eps);
}

}  // namespace jaxgemv::cuda
