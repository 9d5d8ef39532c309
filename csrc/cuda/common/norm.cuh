// RMSNorm before the product: x * rsqrt(mean(x^2) + eps) * norm. The rsqrt factor of a row of x is applied at the end
// of the product, so that x is read once; `norm` is multiplied into x before it.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda {

// Eight elements of x or of norm, not yet converted, from rows that are aligned to 16 bytes; zeros where not `inside`.
struct RawOctet {
  uint4 raw[2] = {};

  __device__ __forceinline__ void ask(const void* rows, Dtype dtype, Index at = 0,
                                      bool inside = true) {
    if (!inside) return;
    const char* const from = static_cast<const char*>(rows) + at * size_of(dtype);
    raw[0] = load16(from);
    if (dtype == Dtype::kF32) raw[1] = load16(from + 16);
  }
};

// The values of norm for entry s of the stack, from k on; without norm all are one.
struct NormValues {
  const char* data;
  Dtype dtype;

  __device__ __forceinline__ NormValues(const Param& norm, Index s, Index k)
      : data(static_cast<const char*>(norm.data)), dtype(norm.dtype) {
    if (data != nullptr) data += (s * norm.stack_stride + k) * size_of(dtype);
  }

  // to[i] = the value at k + i, counted from the constructor's k, for i < kCount.
  template <int kCount>
  __device__ __forceinline__ void load(float (&to)[kCount], int k) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = data == nullptr ? 1.f : cuda::load(data, dtype, k + i);
  }
};

// The norm values that a warp needs, in shared memory. They are copied together with x, ahead of the weights: behind 64
// KB of weights an answer takes a microsecond. The weights are asked for only after this, so ask() is few instructions,
// with byte counts from the host.
struct StagedNorm {
  uint8_t* data;
  Dtype dtype;
  bool is_one = false;  // where a kernel with a norm is called without one

  // Starts copying `bytes` bytes, kMost at most; called by all lanes together.
  template <int kMost>
  __device__ __forceinline__ void ask(const char* from, int bytes) const {
    const int lane = static_cast<int>(threadIdx.x % 32) * 16;
    uint8_t* const to = data + lane;
    from = kept(from + lane);
#pragma unroll
    for (int at = 0; at < kMost; at += 32 * 16)
      if (lane + at < bytes) copy16(to + at, from + at);
  }

  // to[i] = the value at k + i.
  __device__ __forceinline__ void load_octet(float (&to)[8], int k) const {
    const bool is_wide = dtype == Dtype::kF32;
    const auto from = reinterpret_cast<const uint4*>(data + (k << (is_wide ? 2 : 1)));
    get_octet({from[0], is_wide ? from[1] : uint4{}}, dtype, to);
  }
  __device__ __forceinline__ float of(int k) const {
    const uint8_t* const from = data + k * size_of(dtype);
    return dtype == Dtype::kF32
               ? *reinterpret_cast<const float*>(from)
               : float_of_bits(*reinterpret_cast<const unsigned short*>(from), dtype);
  }
};

__device__ __forceinline__ float norm_factor(float squares, Index K, float eps) {
  return rsqrtf(__fdividef(squares, static_cast<float>(K)) + eps);
}

}  // namespace jaxgemv::cuda
