// Packed words to mma fragments, without a conversion instruction.
//
// A lane's word holds codes of consecutive k, and an mma wants pairs. Masking a word gives pairs
// whose k are half a word apart; which k sits in which slot does not matter as long as x is
// permuted alike
// (`load_columns`), so no shuffle is needed and the weights stay in their natural order in memory.
//
//   fp16: the masked bits, read as half2, are fp16 subnormals: q * 2^-24 (or 2^-20 four bits up),
//         exact, and the tensor core multiplies subnormals at full precision and speed. The power
//         of two goes into `kFirst` and `kSecond`.
//   bf16: has too few bits for that. 0x4300 | q is 128 + q for a 4-bit q; subtracting 128 + centre
//   is
//         exact. An 8-bit code is two 4-bit digits with a factor of 16.
#pragma once

#include "ptx.cuh"

namespace jaxgemv::cuda {

// (w & mask) | 0x4300 in both halves, minus `magic`: one logic operation and one subtraction.
__device__ __forceinline__ uint32_t bf16_digits(uint32_t w, float magic) {
  const uint32_t biased = (w & 0x000f000fu) | 0x43004300u;
  const __nv_bfloat162 v =
      __hsub2(reinterpret_cast<const __nv_bfloat162&>(biased), __float2bfloat162_rn(magic));
  return reinterpret_cast<const uint32_t&>(v);
}

// For each width and type of x:
//   kCentre     what `fragments` has subtracted from every code
//   kProducts   mmas a word takes; the first's sum is worth kFirst, the second's kSecond
//   kColumns    distinct pairs of B registers a word takes; product p uses column p % kColumns
//   fragments   f[p][0], f[p][1]: the two A registers of product p for one row
template <int kBits, typename X>
struct Dequant;

template <>
struct Dequant<4, __half> {
  static constexpr int kCentre = 0, kProducts = 2, kColumns = 2;
  static constexpr float kFirst = 0x1p24f, kSecond = 0x1p20f;
  static __device__ __forceinline__ void fragments(uint32_t w, uint32_t (&f)[2][2]) {
    const uint32_t high = w >> 8;
    f[0][0] = w & 0x000f000fu, f[0][1] = high & 0x000f000fu;  // (k0, k4), (k2, k6)
    f[1][0] = w & 0x00f000f0u, f[1][1] = high & 0x00f000f0u;  // (k1, k5), (k3, k7)
  }
};

template <>
struct Dequant<4, __nv_bfloat16> {
  static constexpr int kCentre = 8, kProducts = 2, kColumns = 2;
  static constexpr float kFirst = 1, kSecond = 1;
  static __device__ __forceinline__ void fragments(uint32_t w, uint32_t (&f)[2][2]) {
    f[0][0] = bf16_digits(w, 136.f), f[0][1] = bf16_digits(w >> 8, 136.f);
    f[1][0] = bf16_digits(w >> 4, 136.f), f[1][1] = bf16_digits(w >> 12, 136.f);
  }
};

template <>
struct Dequant<8, __half> {
  static constexpr int kCentre = 0, kProducts = 1, kColumns = 1;
  static constexpr float kFirst = 0x1p24f, kSecond = 0;
  static __device__ __forceinline__ void fragments(uint32_t w, uint32_t (&f)[2][2]) {
    f[0][0] = w & 0x00ff00ffu, f[0][1] = (w >> 8) & 0x00ff00ffu;  // (k0, k2), (k1, k3)
  }
};

template <>
struct Dequant<8, __nv_bfloat16> {
  static constexpr int kCentre = 128, kProducts = 2, kColumns = 1;
  static constexpr float kFirst = 1, kSecond = 16;
  static __device__ __forceinline__ void fragments(uint32_t w, uint32_t (&f)[2][2]) {
    f[0][0] = bf16_digits(w, 128.f), f[0][1] = bf16_digits(w >> 8, 128.f);
    f[1][0] = bf16_digits(w >> 4, 136.f), f[1][1] = bf16_digits(w >> 12, 136.f);
  }
};

// The B registers that meet one packed word, from the word's x in natural order: 16 bytes of fp16
// or bf16 for eight 4-bit codes, 8 for four 8-bit codes.
template <int kBits>
__device__ __forceinline__ void load_columns(const void* x, bool inside, uint32_t (&b)[2][2]) {
  constexpr uint32_t kLow = 0x5410,
                     kHigh = 0x7632;  // the low halves of two registers, the high ones
  if constexpr (kBits == 4) {
    const uint4 v = inside ? load16(x) : uint4{};
    b[0][0] = __byte_perm(v.x, v.z, kLow), b[0][1] = __byte_perm(v.y, v.w, kLow);
    b[1][0] = __byte_perm(v.x, v.z, kHigh), b[1][1] = __byte_perm(v.y, v.w, kHigh);
  } else {
    const uint2 v = inside ? load8(x) : uint2{};
    b[0][0] = __byte_perm(v.x, v.y, kLow), b[0][1] = __byte_perm(v.x, v.y, kHigh);
  }
}

}  // namespace jaxgemv::cuda
