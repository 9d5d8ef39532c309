// RMSNorm before the product: x * rsqrt(mean(x^2) + eps) * norm. The factor of a row comes last, at
// the end of the product, so that x is read once; here are the others.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

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
};

// Those that a warp needs, in shared memory. Their copies travel with x, ahead of the weights: behind
// 64 KB of these an answer takes a microsecond. `data` is null where all are one.
struct StagedNorm {
  uint8_t* data;
  Dtype dtype;

  // Asks for the first `count` of `from`, all lanes together.
  __device__ __forceinline__ void ask(const NormValues& from, int count) const {
    if (data == nullptr) return;
#pragma unroll 1
    for (int at = threadIdx.x % 32 * 16; at < count * size_of(dtype); at += 32 * 16)
      copy16(data + at, from.data + at);
  }

  // to[i] = that of k + i.
  __device__ __forceinline__ void load_octet(float (&to)[8], int k) const {
    if (data == nullptr) {
#pragma unroll
      for (float& v : to) v = 1;
      return;
    }
    const auto from = reinterpret_cast<const uint4*>(data + k * size_of(dtype));
    get_octet({from[0], dtype == Dtype::kF32 ? from[1] : uint4{}}, dtype, to);
  }
};

__device__ __forceinline__ float norm_factor(float squares, Index K, float eps) {
  return rsqrtf(squares / static_cast<float>(K) + eps);
}

}  // namespace jaxgemv::cuda
