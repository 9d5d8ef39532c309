// Loads and stores whose dtype is known only at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "../../gemv.h"

namespace jaxgemv::cuda {

// The Dtype of a C++ type of x's elements; a type without one does not compile.
template <typename T>
struct NoDtype;
template <typename T>
inline constexpr Dtype kDtypeOf = NoDtype<T>::value;
template <>
inline constexpr Dtype kDtypeOf<float> = Dtype::kF32;
template <>
inline constexpr Dtype kDtypeOf<__half> = Dtype::kF16;
template <>
inline constexpr Dtype kDtypeOf<__nv_bfloat16> = Dtype::kBF16;

// The element of a wide dtype (16 or 32 bits) whose bits are the low ones of `bits`.
__device__ __forceinline__ float float_of_bits(uint32_t bits, Dtype dtype) {
  // No branches: this is in the inner loops.
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const float other = __uint_as_float(dtype == Dtype::kBF16 ? bits << 16 : bits);
  return dtype == Dtype::kF16 ? half : other;
}

// Eight elements of a wide dtype, as floats; those of 16 bits are all in the first half of `raw`.
__device__ __forceinline__ void get_octet(const uint4 (&raw)[2], Dtype dtype, float (&to)[8]) {
  const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                             raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  const auto convert = [&](Dtype known) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = words[known == Dtype::kF32 ? i : i / 2];
      to[i] = float_of_bits(known == Dtype::kF32 ? word
                            : i % 2              ? word >> 16
                                                 : word & 0xffffu,
                            known);
    }
  };
  // One branch for all eight, since the dtype is known only at run time.
  if (dtype == Dtype::kBF16) return convert(Dtype::kBF16);
  if (dtype == Dtype::kF32) return convert(Dtype::kF32);
  convert(Dtype::kF16);
}

// The value of an element of a one-byte dtype.
__device__ __forceinline__ float float_of_byte(uint32_t byte, Dtype dtype) {
  if (dtype == Dtype::kE8M0) return __uint_as_float(bits_of_e8m0(byte));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(byte)));
  return __low2float(reinterpret_cast<const __half2&>(pair));
#else
  const float e4m3 = __uint_as_float((byte & 127) << 20) * 0x1p120f;
  return (byte & 127) == 127 ? NAN : byte & 128 ? -e4m3 : e4m3;
#endif
}

__device__ __forceinline__ uint32_t load_bits(const void* data, Dtype dtype, Index i) {
  if (dtype == Dtype::kF32) return __ldg(static_cast<const uint32_t*>(data) + i);
  return __ldg(static_cast<const unsigned short*>(data) + i);
}

// Element i of an array of a wide dtype.
__device__ __forceinline__ float load(const void* data, Dtype dtype, Index i) {
  return float_of_bits(load_bits(data, dtype, i), dtype);
}

__device__ __forceinline__ void store(void* data, Dtype dtype, Index i, float v) {
  switch (dtype) {
    case Dtype::kF32: static_cast<float*>(data)[i] = v; break;
    case Dtype::kF16: static_cast<__half*>(data)[i] = __float2half_rn(v); break;
    case Dtype::kBF16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(v); break;
    case Dtype::kE4M3:
    case Dtype::kE8M0:  // only of scales
    case Dtype::kI8:
    case Dtype::kI32: break;  // not here
  }
}

// Four neighbours, for an i that is a multiple of four.
__device__ __forceinline__ void store4(void* data, Dtype dtype, Index i, const float4& v) {
  if (dtype == Dtype::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + i) = v;
    return;
  }
  uint2 bits;
  if (dtype == Dtype::kF16) {
    const __half2 two[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
    bits = reinterpret_cast<const uint2&>(two);
  } else {
    const __nv_bfloat162 two[2] = {__floats2bfloat162_rn(v.x, v.y),
                                   __floats2bfloat162_rn(v.z, v.w)};
    bits = reinterpret_cast<const uint2&>(two);
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + i) = bits;
}

__device__ __forceinline__ Index offset_of(const Param& p, Index s, Index n, Index g) {
  return s * p.stack_stride + n * p.n_stride + g * p.g_stride;
}

// Element (s, n, g) of a parameter of a wide dtype.
__device__ __forceinline__ float load(const Param& p, Index s, Index n, Index g) {
  return load(p.data, p.dtype, offset_of(p, s, n, g));
}

// Element (s, n, g) of a scale, whose dtype may be of one byte.
__device__ __forceinline__ float load_scale(const Param& p, Index s, Index n, Index g) {
  if (is_wide(p.dtype)) return load(p, s, n, g);
  const uint32_t byte = __ldg(static_cast<const uint8_t*>(p.data) + offset_of(p, s, n, g));
  return __uint_as_float(float32_bits(byte, p.dtype));
}

// A parameter with its strides in bytes.
struct ScaleSource {
  const char* data;
  Index stack_bytes;
  int n_bytes, g_bytes;
  Dtype dtype;

  __device__ __forceinline__ const char* row(int s, int n) const {
    return data + s * stack_bytes + n * Index{n_bytes};
  }
};

inline ScaleSource source_of(const Param& param) {
  const int size = size_of(param.dtype);
  return {static_cast<const char*>(param.data), param.stack_stride * size,
          static_cast<int>(param.n_stride * size), static_cast<int>(param.g_stride * size),
          param.dtype};
}

// Whether a row of the weights has one scale for all of K, or is one group.
inline bool has_one_group(const Problem& problem, const Operands& operands) {
  return problem.group >= problem.K ||
         (operands.scale.g_stride == 0 && operands.shift.g_stride == 0);
}

// The stack matrix that slice b of the batch is multiplied with; -1 when its index is out of range.
__device__ __forceinline__ int stack_entry(const int32_t* index, Index stack, Index b) {
  if (index == nullptr) return 0;
  const int s = index[b];
  return s >= 0 && s < stack ? s : -1;
}

}  // namespace jaxgemv::cuda
