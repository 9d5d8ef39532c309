// Element types. Every function here, and every other one that distinguishes dtypes, is a switch without a
// default: with -Werror=switch a new dtype is a compile error wherever it has to be handled.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

#include "format.h"

namespace jaxgemv {

enum class Dtype : uint8_t { kF16, kBF16, kF32, kE4M3, kE8M0, kI8, kI32 };

inline constexpr Dtype kDtypes[] = {Dtype::kF16,  Dtype::kBF16, Dtype::kF32, Dtype::kE4M3,
                                    Dtype::kE8M0, Dtype::kI8,   Dtype::kI32};
static_assert(std::size(kDtypes) == static_cast<int>(Dtype::kI32) + 1);

// The name that JAX uses.
constexpr std::string_view name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16: return "float16";
    case Dtype::kBF16: return "bfloat16";
    case Dtype::kF32: return "float32";
    case Dtype::kE4M3: return "float8_e4m3fn";
    case Dtype::kE8M0: return "float8_e8m0fnu";
    case Dtype::kI8: return "int8";
    case Dtype::kI32: return "int32";
  }
  __builtin_unreachable();
}

JAXGEMV_HD constexpr int size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
    case Dtype::kBF16: return 2;
    case Dtype::kF32:
    case Dtype::kI32: return 4;
    case Dtype::kE4M3:
    case Dtype::kE8M0:
    case Dtype::kI8: return 1;
  }
  __builtin_unreachable();
}

// The dtypes that x, y and all parameters except scale may have, unless the product is one of integers.
JAXGEMV_HD constexpr bool is_wide(Dtype dtype) { return dtype <= Dtype::kF32; }
JAXGEMV_HD constexpr bool is_one_byte_scale(Dtype dtype) {
  return dtype == Dtype::kE4M3 || dtype == Dtype::kE8M0;
}

// The bit pattern of the float32 with the value of a one-byte float; NaN for a byte that encodes NaN.
JAXGEMV_HD constexpr uint32_t bits_of_e4m3(uint32_t byte) {
  const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7, sign = (byte & 128) << 24;
  if ((byte & 127) == 127) return 0x7fc00000;
  if (exponent > 0) return sign | (exponent + 120) << 23 | mantissa << 20;
  if (mantissa == 0) return sign;
  const uint32_t log = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // mantissa * 2^-9
  return sign | (log + 118) << 23 | (mantissa << (23 - log) & 0x7fffff);
}
JAXGEMV_HD constexpr uint32_t bits_of_e8m0(uint32_t byte) {
  return byte == 0 ? 0x00400000 : byte == 255 ? 0x7fc00000 : byte << 23;
}

JAXGEMV_HD constexpr uint32_t bits_of_f16(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023, sign = (half & 0x8000) << 16;
  if (exponent == 31) return sign | 0x7f800000 | mantissa << 13;
  if (exponent > 0) return sign | (exponent + 112) << 23 | mantissa << 13;
  uint32_t log = 0;  // mantissa * 2^-24
  while (mantissa >> log > 1) ++log;
  return mantissa == 0 ? sign : sign | (log + 103) << 23 | (mantissa << (23 - log) & 0x7fffff);
}

// An e5m2 byte is the upper half of a float16.
JAXGEMV_HD constexpr uint32_t bits_of_e5m2(uint32_t byte) { return bits_of_f16(byte << 8); }

// The bit pattern of the float32 with the value of an element, whose own bits are the low ones of `bits`.
JAXGEMV_HD constexpr uint32_t float32_bits(uint32_t bits, Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16: return bits_of_f16(bits);
    case Dtype::kBF16: return bits << 16;
    case Dtype::kF32: return bits;
    case Dtype::kE4M3: return bits_of_e4m3(bits);
    case Dtype::kE8M0: return bits_of_e8m0(bits);
    case Dtype::kI8:
    case Dtype::kI32: break;
  }
  __builtin_unreachable();
}

static_assert(bits_of_f16(0x3c00) == 0x3f800000 && bits_of_f16(0x8001) == 0xb3800000 &&
              bits_of_f16(0x7c00) == 0x7f800000);
static_assert(bits_of_e4m3(0x38) == 0x3f800000 && bits_of_e4m3(0x01) == 0x3b000000 &&
              bits_of_e4m3(0x87) == 0xbc600000 && bits_of_e4m3(0x7e) == 0x43e00000);
static_assert(bits_of_e8m0(127) == 0x3f800000);

}  // namespace jaxgemv
