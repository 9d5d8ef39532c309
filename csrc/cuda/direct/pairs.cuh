// Octets of weights as operand A of the direct kernel: codes p and p + 4 as a pair of Element.
#pragma once

#include "../common/formats.cuh"

namespace jaxgemv::cuda::direct {

// A weight is the sum of kParts numbers of Element, times unit(). For octets of them:
//   make(..)       if kHasTable: called by the whole CTA, before the first octet
//   has(part)      whether this part may be anything but zero
//   of(..)         one part of an octet, as registers of operand A
// kHasShift: whether the weights have an offset, or a zero.
template <Format kFormat, int kBits, typename Element>
struct Pairs;

struct PlainPairs {
  static constexpr int kParts = 1;
  static constexpr bool kHasTable = false;
  static __device__ __forceinline__ bool has(int) { return true; }
};

template <int kBits, typename Element>
struct Pairs<Format::kAffine, kBits, Element> : PlainPairs {
  static constexpr bool kHasShift = true;
  static __device__ __forceinline__ float unit() { return Bits<Element>::kWorth; }

  static __device__ __forceinline__ void of(uint32_t low, uint32_t high, int, uint32_t (&a)[4]) {
    Octet<kBits, Element>::pairs(low, high, a);
  }
};

// Float8 is exact in fp16 and bfloat16; a conversion instruction exists for fp16.
template <Format kFormat, typename Element>
  requires(is_float8(kFormat))
struct Pairs<kFormat, 8, Element> : PlainPairs {
  static constexpr bool kHasShift = false;
  static __device__ __forceinline__ float unit() { return 1; }

  static __device__ __forceinline__ void of(uint32_t low, uint32_t high, int, uint32_t (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      a[p] = pair_of_float8<kFormat>(__byte_perm(low, high, p | (p + 4) << 4));
      if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(a[p]));
        a[p] = rounded_pair<Element>(pair.x, pair.y);
      }
    }
  }
};

// Tables of 16 lie in shared memory, a copy for each lane in a bank of its own, with two parts in a word.
template <typename Element>
struct Pairs<Format::kCodebook, 4, Element> {
  static constexpr bool kIsHalf = std::is_same_v<Element, __half>;
  static constexpr int kParts = kIsHalf ? 2 : 3;  // 22 bits, and all 24
  static constexpr bool kHasTable = true, kHasShift = false;

  // The table of matrix s. Lane l has entry l % 16 of it, and writes that to banks from l on. rounds: whether 2^-14 of
  // the largest entry may be lost, so that two bfloat16 are enough.
  __device__ __forceinline__ void make(const Param& from, int s, bool rounds) {
    const int lane = threadIdx.x % 32;
    const float entry = load(from, s, lane % 16, 0);
    uint32_t words[kWords] = {};
    if constexpr (kIsHalf) {
      const HalvesOfEntry halves(entry, rounds);
      words[0] = halves.both, unit_ = halves.unit, parts_ = 1 + halves.has_second;
    } else {
      const bool finite = fabsf(entry) < INFINITY;
      float rest = entry;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const __nv_bfloat16 own = __float2bfloat16_rn(rest);
        if (__any_sync(~0u, rest != 0) && !(rounds && part == 2)) parts_ = part + 1;
        words[part / 2] |= uint32_t{__bfloat16_as_ushort(own)} << (part % 2 * 16);
        rest = finite ? rest - __bfloat162float(own) : 0.f;
      }
    }
#pragma unroll 4
    for (int i = threadIdx.x / 32; i < 16; i += blockDim.x / 32)
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        table()[(w * 16 + lane % 16) * 32 + (lane + i) % 32] = words[w];
    __syncthreads();
  }

  __device__ __forceinline__ bool has(int part) const { return part == 0 || part < parts_; }
  __device__ __forceinline__ float unit() const { return unit_; }

  __device__ __forceinline__ void of(uint32_t low, uint32_t, int part, uint32_t (&a)[4]) const {
    const uint32_t* const from = table() + part / 2 * 16 * 32;
    const auto entry = [&](int i) {
      const uint32_t at = i < 2 ? low << (7 - 4 * i) : low >> (4 * i - 7);  // of 128 bytes
      return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint8_t*>(from) +
                                                ((at & 0x780) | threadIdx.x % 32 * 4));
    };
#pragma unroll
    for (int p = 0; p < 4; ++p)
      a[p] = __byte_perm(entry(p), entry(p + 4), part % 2 ? 0x7632 : 0x5410);
  }

 private:
  static constexpr int kWords = (kParts + 1) / 2;
  int parts_ = 1;
  float unit_ = 1;

  static __device__ __forceinline__ uint32_t* table() {
    __shared__ uint32_t words[kWords * 16 * 32];
    return words;
  }
};

}  // namespace jaxgemv::cuda::direct
