// float16 and bfloat16 to and from float32. Part of kernel.h, and under its rule: internal linkage.
#pragma once

#include <cstdint>

#include "../gemv.h"

namespace jaxgemv {
namespace {

inline Index min_of(Index a, Index b) { return a < b ? a : b; }

inline float f32_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of_f32(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float f32_of_bf16(uint16_t bits) { return f32_of_bits(uint32_t{bits} << 16); }

// Branch-free, and without a subnormal float32 on the way: XLA's threads flush those to zero.
inline float f32_of_f16(uint16_t half) {
  constexpr uint32_t kRebias = (127 - 15) << 23, kExponent = 0x7c00u << 13;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t normal = magnitude + kRebias;
  const uint32_t special = normal + kRebias;  // exponent 255: infinity or NaN
  const uint32_t subnormal =
      bits_of_f32(f32_of_bits(normal + (1u << 23)) - f32_of_bits(kRebias + (1u << 23)));
  const uint32_t exponent = magnitude & kExponent;
  const uint32_t bits = exponent == kExponent ? special : exponent == 0 ? subnormal : normal;
  return f32_of_bits(bits | (half & 0x8000u) << 16);
}

// Both round to nearest, ties to even.
inline uint16_t bf16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t f16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 143u << 23) {
    half = 0x7c00;  // 2^16 and above
  } else if (magnitude < 113u << 23) {
    half = bits_of_f32(f32_of_bits(magnitude) + 0.5f) - bits_of_f32(0.5f);  // below 2^-14
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// XLA may pass slices that are aligned to nothing.
template <typename T>
inline T load(const void* data, Index i) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(data) + i * Index{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
inline void store(void* data, Index i, T value) {
  __builtin_memcpy(static_cast<char*>(data) + i * Index{sizeof(T)}, &value, sizeof(T));
}

// out[0, count) = data[first, first + count)
inline void read_floats(Dtype dtype, const void* data, Index first, Index count, float* out) {
  if (dtype == Dtype::kF32)
    for (Index i = 0; i < count; ++i) out[i] = load<float>(data, first + i);
  else if (dtype == Dtype::kBF16)
    for (Index i = 0; i < count; ++i) out[i] = f32_of_bf16(load<uint16_t>(data, first + i));
  else
    for (Index i = 0; i < count; ++i) out[i] = f32_of_f16(load<uint16_t>(data, first + i));
}

// data[first, first + count) = values[0, count)
inline void write_floats(Dtype dtype, void* data, Index first, Index count, const float* values) {
  if (dtype == Dtype::kF32)
    for (Index i = 0; i < count; ++i) store(data, first + i, values[i]);
  else if (dtype == Dtype::kBF16)
    for (Index i = 0; i < count; ++i) store(data, first + i, bf16_of_f32(values[i]));
  else
    for (Index i = 0; i < count; ++i) store(data, first + i, f16_of_f32(values[i]));
}

inline void write_float(Dtype dtype, void* data, Index i, float value) {
  write_floats(dtype, data, i, 1, &value);
}

}  // namespace
}  // namespace jaxgemv
