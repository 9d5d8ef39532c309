// Weight formats: how packed words become what a main loop multiplies. Codes<format, bits, kind>,
// one for each pair of a format and a kind of x: __half and __nv_bfloat16 (pairs, for mma), int8_t
// (bytes, for the integer mma: code_bytes.cuh), float (one by one).
//
// A word holds codes of consecutive k, and an mma wants pairs. Masking a word gives pairs whose k
// are half a word apart; which k sits in which slot does not matter as long as x is permuted alike,
// so the weights stay in their natural order in memory, and no shuffle is needed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename Kind>
struct Codes;

// Masked codes in the halves of a register, `place` bits up, as Elements: code / kWorth. Read as fp16, bits in the
// mantissa and the lowest bit of the exponent are n * 2^-24 (2^-133 as bfloat16). But tensor cores align products by
// their exponent fields, which are alike for all such small numbers: a code at the lowest place would lose ten bits. A
// product with a power of two brings it up, exactly.
template <typename Element>
struct Bits {
  static constexpr bool kIsHalf = std::is_same_v<Element, __half>;
  static constexpr int kFit = kIsHalf ? 11 : 8;  // bits that a half has for n
  static constexpr float kWorth = kIsHalf ? 0x1p9f : 0x1p6f;
  static constexpr uint32_t kOnes = kIsHalf ? 0x18001800u : 0x3c803c80u;  // code 1 in both halves

  static __device__ __forceinline__ uint32_t numbers(uint32_t codes, int place) {
    using Pair = std::conditional_t<kIsHalf, __half2, __nv_bfloat162>;
    // 2^(15 - place), or 2^(127 - place): at place 0, the largest power of two of the type.
    const uint32_t up = static_cast<uint32_t>(kIsHalf ? (30 - place) << 10 : (254 - place) << 7);
    const uint32_t both = up * 0x00010001u;
    const Pair pair =
        __hmul2(reinterpret_cast<const Pair&>(codes), reinterpret_cast<const Pair&>(both));
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

// The codes of a word as pairs in the halves of registers, as numbers of Kind times 1 / kWorth:
//   product(word, p, half)  registers half = 0, 1 of operand A of product p = 0 .. kProducts - 1 of the word
//   code(p, half, e)        index in the word of the code that is element e of such a register
template <int kBits>
struct WordPairs {
  static constexpr int kWordCodes = 32 / kBits, kProducts = 8 / kBits;
  static __device__ constexpr int code(int p, int half, int e) {
    return p + half * (8 / kBits) + e * (16 / kBits);
  }
};

// For formats without a table in shared memory. kTableBytes: its size in code for this architecture; table_bytes_on:
// what the host has to reserve for a GPU of this major version.
struct WithoutTable {
  static constexpr int kTableBytes = 0;
  static constexpr int table_bytes_on(int /*major*/) { return 0; }
};

// Defaults for formats that keep no state in registers. Each code has a number in each of kPlanes planes, whose sums a
// kernel keeps apart.
// kOfSecond: what the second plane's sum is worth, if there are two.
// kHasSums: whether sum(x) is needed too, for zeros and offsets or the least entry of a table.
// kTakesScales: whether scales are multiplied into the operand: see scaled.cuh.
struct Stateless : WithoutTable {
  static constexpr int kPlanes = 1;
  static constexpr bool kHasSums = true, kTakesScales = false;
  static constexpr float kOfSecond = 1;
  Stateless() = default;
  __device__ __forceinline__ Stateless(const Param&, Index) {}
  static __device__ __forceinline__ bool has(int) { return true; }
  static __device__ __forceinline__ float unit() { return 1; }
};

template <int kBits, typename Kind>
  requires(sizeof(Kind) == 2)
struct Codes<Format::kAffine, kBits, Kind> : WordPairs<kBits>, Bits<Kind>, Stateless {
  using Stateless::Stateless;
  static __device__ __forceinline__ uint32_t product(uint32_t word, int p, int half) {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
    return Bits<Kind>::numbers((half ? word >> 8 : word) & kMask << (kBits * p), kBits * p);
  }
  static __device__ __forceinline__ uint32_t product(uint32_t word, int, int p, int half) {
    return product(word, p, half);
  }
};

// An octet, eight consecutive codes of any width, as A operands of two mma.m16n8k16: register p has
// codes p and p + 4. The halves of the octet are put side by side, two bytes of each, so that a mask
// finds both codes.
template <int kBits, typename Element = __half>
struct Octet : Bits<Element> {
  static constexpr int kWidth = kBits;
  static __device__ constexpr int code(int p, int e) { return p + 4 * e; }

  // Pair p lies in two bytes of each half, from `byte` on; shifted down by `shift` bits it is at `place`.
  struct Window {
    int byte, shift, place;
  };
  static __device__ constexpr Window window(int p) {
    constexpr int kFit = Bits<Element>::kFit;
    const int byte = kBits > 4 ? kBits * p / 8 : 0, at = kBits * p - 8 * byte;
    const int fit = kFit / kBits;  // codes
    const int shift = kBits <= 4 ? p / fit * fit * kBits : at + kBits > kFit ? at : 0;
    return {byte, shift, at - shift};
  }

  // low, high: the 8 * kBits bits of the octet; bits above them may be anything.
  static __device__ __forceinline__ void pairs(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    masked(low, high, a);
#pragma unroll
    for (int p = 0; p < 4; ++p) a[p] = Bits<Element>::numbers(a[p], window(p).place);
  }
  // The same without the conversion: each pair masked, still at its place.
  static __device__ __forceinline__ void masked(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    // The second half begins at byte kSecond of the two words, or, for odd widths, is shifted to a word of its own.
    constexpr int kSecond = kBits % 2 ? 4 : kBits / 2;
    uint32_t second = high;
    if (kBits % 2) second = kBits > 4 ? __funnelshift_rc(low, high, 4 * kBits) : low >> (4 * kBits);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
      const int byte = window(p).byte, other = byte + kSecond;
      const int bytes = byte | (byte + 1) << 4 | other << 8 | (other + 1) % 8 << 12;
      const uint32_t both = kBits == 4 ? low : __byte_perm(low, second, bytes);
      a[p] = both >> window(p).shift & kMask << window(p).place;
    }
  }

  // Loads octet t of the four consecutive ones at `from`, for lane t of a quad.
  static __device__ __forceinline__ void load(const uint32_t* from, int t, uint32_t& low,
                                              uint32_t& high) {
    constexpr int kUneven = kBits % 4 == 0 ? 0 : kBits % 2 == 0 ? 2 : 3;  // most bytes past a word
    constexpr int kWords = (kUneven + kBits + 3) / 4;
    uint32_t w[3] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) w[i] = from[kBits * t / 4 + i];
    low = kUneven == 0 ? w[0] : __funnelshift_r(w[0], w[1], 8 * (kBits * t % 4));
    high = kUneven == 0 ? w[1] : __funnelshift_r(w[1], w[2], 8 * (kBits * t % 4));
  }

  // Where octets are not whole words, a lane does better with a run of four consecutive ones, kBits words: octet j of a
  // run lies at a place known at compile time.
  static constexpr bool kRuns = kBits % 4 != 0;
  static __device__ __forceinline__ void of_run(const uint32_t* run, int j, uint32_t& low,
                                                uint32_t& high) {
    const int word = kBits * j / 4, shift = 8 * (kBits * j % 4);
    const auto at = [&](int i) { return i < kBits ? run[i] : 0; };
    low = __funnelshift_r(at(word), at(word + 1), shift);
    high = kBits > 4 ? __funnelshift_r(at(word + 1), at(word + 2), shift) : 0;
  }
};

// Code i of consecutive codes in words, as a float without a conversion: masked where it lies, within the low 23 bits
// of a word, and joined with the exponent of 2^23, it reads 2^23 + q * 2^place. `exponent` is kExponent in a register
// that the compiler cannot see through: otherwise masking takes two instructions.
template <int kBits>
struct CodesInWords {
  static constexpr uint32_t kExponent = 0x4b000000;

  // Codes that end above bit 23 of the word that they begin in are taken 16 bits further on.
  static __device__ constexpr bool is_high(int i) { return i * kBits % 32 + kBits > 23; }
  static __device__ constexpr int place(int i) { return i * kBits % 32 - (is_high(i) ? 16 : 0); }

  template <int kWords>
  static __device__ __forceinline__ float masked(const uint32_t (&words)[kWords], int i,
                                                 uint32_t exponent) {
    const int word = i * kBits / 32;
    const uint32_t next = word + 1 < kWords ? words[word + 1] : 0;
    const uint32_t bits = is_high(i) ? __funnelshift_r(words[word], next, 16) : words[word];
    const uint32_t mask = ((1u << kBits) - 1) << place(i);
    return __uint_as_float((bits & mask) | exponent);
  }
  // scaled: code i times 2^place(i), by a subtraction. value: code i, by an FMA.
  template <int kWords>
  static __device__ __forceinline__ float scaled(const uint32_t (&words)[kWords], int i,
                                                 uint32_t exponent) {
    return masked(words, i, exponent) - 0x1p23f;
  }
  template <int kWords>
  static __device__ __forceinline__ float value(const uint32_t (&words)[kWords], int i,
                                                uint32_t exponent) {
    const float worth = 1.f / static_cast<float>(1 << place(i));
    return fmaf(masked(words, i, exponent), worth, -0x1p23f * worth);
  }
};

// For kernels in float32. kMid is the zero point of symmetric weights.
template <int kBits>
struct Codes<Format::kAffine, kBits, float> : CodesInWords<kBits> {
  static constexpr float kMid = mid_code(kBits);
  __device__ __forceinline__ Codes(const Param&, Index) {}
  using CodesInWords<kBits>::value;
  __device__ __forceinline__ float value(uint64_t octet, int i) const {
    return static_cast<float>(code_of<kBits>(octet, i));
  }
};

// The bytes of an octet in the low bits of the result; `available` < kBits only at a row's end.
template <int kBits>
__device__ __forceinline__ uint64_t load_octet(const uint8_t* p, Index available, bool aligned) {
  if constexpr (kBits % 4 == 0) {
    if (aligned && available >= kBits) {
      uint64_t octet = __ldg(reinterpret_cast<const uint32_t*>(p));
      if (kBits == 8) octet |= uint64_t{__ldg(reinterpret_cast<const uint32_t*>(p) + 1)} << 32;
      return octet;
    }
  }
  uint64_t octet = 0;
#pragma unroll
  for (int i = 0; i < kBits; ++i)
    if (i < available) octet |= uint64_t{__ldg(p + i)} << (8 * i);
  return octet;
}

}  // namespace jaxgemv::cuda
