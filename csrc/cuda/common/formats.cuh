// Weight formats other than integers: entries of a table, and float8. The same traits as codes.cuh.
#pragma once

#include "codes.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda {

// Code i of the consecutive codes in `words`.
template <int kBits, int kWords>
__device__ __forceinline__ uint32_t code_in_words(const uint32_t (&words)[kWords], int i) {
  const int word = i * kBits / 32, at = i * kBits % 32;
  const uint32_t next = word + 1 < kWords ? words[word + 1] : 0;
  const uint32_t bits =
      at + kBits > 32 ? __funnelshift_r(words[word], next, at) : words[word] >> at;
  return bits & ((1u << kBits) - 1);
}

// Code i of an octet, for kernels in float32.
template <int kBits>
struct Codes<Format::kCodebook, kBits, float> {
  static constexpr float kMid = 0;
  __device__ __forceinline__ Codes(const Param& table, Index s)
      : table_(table), s_(s < 0 ? 0 : s) {}
  __device__ __forceinline__ float value(uint64_t octet, int i) const {
    return load(table_, s_, code_of<kBits>(octet, i), 0);
  }

 private:
  const Param& table_;
  const Index s_;
};

template <Format kFormat>
struct Float8Codes {
  static constexpr float kMid = 0;
  __device__ __forceinline__ Float8Codes(const Param&, Index) {}
  template <int kWords>
  __device__ __forceinline__ float value(const uint32_t (&words)[kWords], int i, uint32_t) const {
    return value(code_in_words<8>(words, i), 0);
  }
  __device__ __forceinline__ float value(uint64_t octet, int i) const {
    const uint32_t byte = static_cast<uint32_t>(code_of<8>(octet, i));
    if constexpr (kFormat == Format::kE4M3) return float_of_byte(byte, Dtype::kE4M3);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(byte << 8)));
  }
};
template <>
struct Codes<Format::kE4M3, 8, float> : Float8Codes<Format::kE4M3> {
  using Float8Codes::Float8Codes;
};
template <>
struct Codes<Format::kE5M2, 8, float> : Float8Codes<Format::kE5M2> {
  using Float8Codes::Float8Codes;
};

// Decodes octets into A operands of mma.m16n8k16. What a kernel has to know and keep for that:
//   kParts         how many fp16 numbers add up to a weight
//   kTableBytes    shared memory of the table that make_table fills
//   ask_for_entry  loads this lane's table entry of stack matrix s for make_table, without waiting for it
//   code(p, e)     index in the octet of the code that is element e of register p
//   decode(..)     one of the parts of an octet
//   has_second()   whether the second part may be anything but zero
//   unit()         factor of a sum, besides kWorth
template <Format kFormat, int kBits>
struct Decoder;

struct PlainDecoder {
  static constexpr int kParts = 1, kTableBytes = 0;
  static constexpr bool kHasShift = false;
  static __device__ __forceinline__ uint32_t ask_for_entry(const Param&, Index) { return 0; }
  static __device__ __forceinline__ void make_table(const Param&, uint32_t, uint8_t*, bool, int) {}
  static __device__ __forceinline__ bool has_second() { return false; }
  static __device__ __forceinline__ float unit() { return 1; }
};

template <int kBits>
struct Decoder<Format::kAffine, kBits> : PlainDecoder, Octet<kBits> {
  static constexpr bool kHasShift = true;
  __device__ __forceinline__ explicit Decoder(const uint8_t*) {}
  static __device__ __forceinline__ void decode(uint32_t low, uint32_t high, int,
                                                uint32_t (&a)[4]) {
    Octet<kBits>::pairs(low, high, a);
  }
};

// Called by a whole warp, with entries already scaled by a power of two: a factor with which one fp16 holds each to
// 2^-14 of the largest (`rounds`: enough for 16-bit x), or each to 2^-22 of itself; or 0. For FP4 it is 1.5; for NF4
// what a search, to 2^-22, found.
__device__ __forceinline__ float factor_of_halves(float entry, float largest, bool rounds = true) {
  const auto holds = [&](float factor) {
    const float scaled = entry * factor, rest = scaled - __half2float(__float2half_rn(scaled));
    const float most = rounds ? largest * (factor * 0x1p-14f) : fabsf(scaled) * 0x1p-22f;
    return !__any_sync(~0u, fabsf(rest) > most);
  };
  return holds(1) ? 1 : holds(1.5f) ? 1.5f : holds(1.67765375f) ? 1.67765375f : 0;
}

// The table entry of this lane (each half of a warp has all 16) as the sum of two fp16, to 22 bits, after one power of
// two has brought all entries under 2^14. Those of E2M1, say, need only the first.
struct HalvesOfEntry {
  uint32_t both;  // first fp16 in the low half, second in the high
  float unit;
  bool has_second;  // whether any of the entries has one

  // rounds: whether entries may be rounded to one fp16 each, by factor_of_halves.
  __device__ __forceinline__ HalvesOfEntry(float entry, bool rounds) {
    const uint32_t bits = __float_as_uint(entry) & 0x7fffffffu;
    const bool finite = bits < 0x7f800000u;
    const uint32_t largest = __reduce_max_sync(~0u, finite ? bits : 0);
    const int exponent = min(13 + 127 - static_cast<int>(largest >> 23), 126);
    const float power = __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
    float scaled = entry * power;
    const float factor = rounds ? factor_of_halves(scaled, __uint_as_float(largest) * power) : 0;
    scaled *= factor != 0 ? factor : 1;
    const __half first = __float2half_rn(scaled);
    const float rest = finite && factor == 0 ? scaled - __half2float(first) : 0;
    const uint32_t second = __half_as_ushort(__float2half_rn(rest));
    both = __half_as_ushort(first) | second << 16;
    unit = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    if (factor != 0) unit /= factor;
    has_second = __any_sync(~0u, (second & 0x7fff) != 0);
  }
};

// Raw bits of entry lane % 16 of stack matrix s's table: as bits, so that nothing waits for the load here.
__device__ __forceinline__ uint32_t entry_bits(const Param& table, Index s) {
  return load_bits(table.data, table.dtype, offset_of(table, s, threadIdx.x % 16, 0));
}

// Tables of 16 entries: a byte is two codes, and finds both of their entries in shared memory. Each lane has a table of
// its own in a bank of its own.
template <>
struct Decoder<Format::kCodebook, 4> : Octet<4> {
  static constexpr int kParts = 2, kPartBytes = 256 * 128, kTableBytes = kParts * kPartBytes + 128;
  static constexpr bool kHasShift = false;
  static constexpr float kWorth = 1;
  static __device__ constexpr int code(int p, int e) { return 2 * p + e; }

  static __device__ __forceinline__ uint32_t ask_for_entry(const Param& table, Index s) {
    return entry_bits(table, s);
  }
  // Called by all threads of the first `warps` warps of a CTA, which then have to synchronize. rounds: as in
  // HalvesOfEntry.
  static __device__ __forceinline__ void make_table(const Param& table, uint32_t bits, uint8_t* to,
                                                    bool rounds, int warps) {
    const int lane = threadIdx.x % 32;
    const HalvesOfEntry entry(float_of_bits(bits, table.dtype), rounds);
#pragma unroll 4
    for (int byte = threadIdx.x / 32; byte < 256; byte += warps) {
      const uint32_t low = __shfl_sync(~0u, entry.both, byte % 16),
                     high = __shfl_sync(~0u, entry.both, byte / 16);
      auto* const at = reinterpret_cast<uint32_t*>(to + byte * 128) + lane;
      at[0] = __byte_perm(low, high, 0x5410);
      if (entry.has_second) at[kPartBytes / 4] = __byte_perm(low, high, 0x7632);
    }
    if (threadIdx.x == 0) {
      auto* const facts = reinterpret_cast<float*>(to + kParts * kPartBytes);
      facts[0] = entry.has_second;
      facts[1] = entry.unit;
    }
  }

  __device__ __forceinline__ explicit Decoder(const uint8_t* table)
      : table_(table), of_lane_(threadIdx.x % 32 * 4) {}
  __device__ __forceinline__ bool has_second() const { return facts()[0] != 0; }
  __device__ __forceinline__ float unit() const { return facts()[1]; }

  __device__ __forceinline__ void decode(uint32_t low, uint32_t, int part, uint32_t (&a)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t shifted = p == 0 ? low << 7 : low >> (8 * p - 7);
      const uint8_t* const at = table_ + ((shifted & 0x7f80u) | of_lane_);
      a[p] = *reinterpret_cast<const uint32_t*>(at + part * kPartBytes);
    }
  }

 private:
  const uint8_t* const table_;
  const uint32_t of_lane_;
  __device__ __forceinline__ const float* facts() const {
    return reinterpret_cast<const float*>(table_ + kParts * kPartBytes);
  }
};

// The two float8 in the low bytes of `v`, as a pair of fp16.
template <Format kFormat>
__device__ __forceinline__ uint32_t pair_of_float8(uint32_t v) {
  const auto upper = [&] { return __byte_perm(v, 0, 0x1404); };
  if constexpr (kFormat == Format::kE5M2) return upper();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(v)));
  return pair;
#else
  // Exponent and mantissa of e4m3, shifted down by one bit, are those of 2^-8 times the number in fp16, for subnormals
  // too.
  const uint32_t bits = upper();
  const uint32_t small = (bits & 0x80008000u) | (bits >> 1 & 0x3f803f80u);
  const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256.f));
  return reinterpret_cast<const uint32_t&>(pair) | __vcmpeq2(bits & 0x7f007f00u, 0x7f007f00u);
#endif
}

// Consecutive codes share a register.
template <Format kFormat>
struct Float8Decoder : PlainDecoder, Octet<8> {
  static constexpr float kWorth = 1;
  static __device__ constexpr int code(int p, int e) { return 2 * p + e; }
  __device__ __forceinline__ explicit Float8Decoder(const uint8_t*) {}
  static __device__ __forceinline__ void decode(uint32_t low, uint32_t high, int,
                                                uint32_t (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      a[p] = pair_of_float8<kFormat>((p < 2 ? low : high) >> (p % 2 * 16));
  }
};
template <>
struct Decoder<Format::kE4M3, 8> : Float8Decoder<Format::kE4M3> {
  using Float8Decoder::Float8Decoder;
};
template <>
struct Decoder<Format::kE5M2, 8> : Float8Decoder<Format::kE5M2> {
  using Float8Decoder::Float8Decoder;
};

// Products of a word of float8, with the traits of codes.cuh.
template <Format kFormat>
struct Float8Products : Stateless {
  using Stateless::Stateless;
  static constexpr bool kHasSums = false;
  static constexpr int kWordCodes = 4, kProducts = 1;
  static constexpr float kWorth = 1;
  static __device__ constexpr int code(int, int half, int e) { return 2 * half + e; }
  static __device__ __forceinline__ uint32_t product(uint32_t word, int, int, int half) {
    return pair_of_float8<kFormat>(word >> (16 * half));
  }
};
template <>
struct Codes<Format::kE4M3, 8, __half> : Float8Products<Format::kE4M3> {
  using Float8Products::Float8Products;
};
template <>
struct Codes<Format::kE5M2, 8, __half> : Float8Products<Format::kE5M2> {
  using Float8Products::Float8Products;
};

}  // namespace jaxgemv::cuda
