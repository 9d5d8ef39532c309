// Integers as bytes, for the integer mma.
#pragma once

#include "codes.cuh"

namespace jaxgemv::cuda {

// An integer on top of kMagic, read as a float, is its value on top of 1.5 * 2^23.
constexpr int kMagic = 0x4b400000;
__device__ __forceinline__ float float_of_magic(int sum) { return __int_as_float(sum) - 0x1.8p23f; }

// quad() puts four codes in the bytes of a register; the kSteps registers of a unit, a word or an octet, have all of
// its codes.
//   code(step, i)     index in the unit of the code that is byte i
//   kUp               by how many bits all codes, in every step, are shifted up
//   kSums             int32 accumulators: one for all steps, or one for each; accumulator i begins with start(i)
//   total(sums, e)    element e of all accumulators together, as a float
//
// Widths that divide 8: codes stay at their places in the byte, so a step's sum is 2^(kBits * step) times too large.
template <int kBits>
  requires(kBits == 2 || kBits == 4 || kBits == 8)
struct Codes<Format::kAffine, kBits, int8_t> : Stateless {
  using Stateless::Stateless;
  static constexpr int kSteps = 8 / kBits, kSums = kSteps, kUp = 0;
  static constexpr bool kSumsByStep = true;
  static __device__ constexpr int code(int step, int i) { return step + kSteps * i; }
  static __device__ constexpr int start(int sum) { return sum == 0 ? kMagic : 0; }
  static __device__ __forceinline__ uint32_t quad(uint32_t word, int step) {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
    return kBits == 8 ? word : word & kMask << (kBits * step);
  }
  static __device__ __forceinline__ float total(const int (&sums)[kSums][4], int e) {
    int all = sums[0][e];
#pragma unroll
    for (int step = 1; step < kSteps; ++step) all += sums[step][e] >> (kBits * step);
    return float_of_magic(all);
  }
};

// For codes that every step has at the same place of its bytes, so that one accumulator takes all steps.
struct OneSum : Stateless {
  using Stateless::Stateless;
  static constexpr int kSums = 1, kUp = 0;
  static constexpr bool kSigned = false;
  static constexpr bool kSumsByStep = false;
  static __device__ constexpr int start(int) { return kMagic; }
  static __device__ __forceinline__ float total(const int (&sums)[kSums][4], int e) {
    return float_of_magic(sums[0][e]);
  }
};

// Widths that do not divide 8: the four codes of half an octet are spread out, first to two in each 16 bits and then to
// one in each byte, at bit 0.
template <int kBits>
  requires(8 % kBits != 0)
struct Codes<Format::kAffine, kBits, int8_t> : OneSum {
  using OneSum::OneSum;
  static constexpr int kSteps = 2;
  static __device__ constexpr int code(int step, int i) { return 4 * step + i; }
  static __device__ __forceinline__ uint32_t quad(uint64_t octet, int step) {
    constexpr int kTwo = 2 * kBits;
    const uint32_t four = static_cast<uint32_t>(octet >> (kTwo * 2 * step));
    const uint32_t twos = __byte_perm(four, four << (16 - kTwo), 0x7610);
    const uint32_t ones = (twos & 0x00ff00ffu) | (twos << (8 - kBits) & 0xff00ff00u);
    return ones & ((1u << kBits) - 1) * 0x01010101u;
  }
};

// A run is four octets in kBits words: byte i of a register has code `step` of octet i. Codes are moved to the top of
// their bytes (kUp), since shifts to the left are multiplications, which run on another unit.
template <int kBits>
struct RunCodes : OneSum {
  using OneSum::OneSum;
  static constexpr int kSteps = 8, kUp = 8 - kBits;
  static __device__ constexpr int code(int step, int i) { return step + 8 * i; }
  static __device__ __forceinline__ uint32_t quad(const uint32_t (&run)[kBits], int step) {
    constexpr uint32_t kOnes = 0x01010101u, kMask = ((1u << kBits) - 1) << kUp;
    const int byte = kBits * step / 8, at = kBits * step % 8;
    const uint32_t bits = bytes(run, byte);
    if (at <= kUp) return bits << (kUp - at) & kMask * kOnes;
    const uint32_t here = kMask & 0xffu >> (at - kUp);
    return (bits >> (at - kUp) & here * kOnes) |
           (bytes(run, byte + 1) << (8 + kUp - at) & (kMask & ~here) * kOnes);
  }

 private:
  // Byte `first` of each of the four octets.
  static __device__ __forceinline__ uint32_t bytes(const uint32_t (&run)[kBits], int first) {
    // prmt: byte i of the result is the one of the eight in {low, high} that selector(i) says.
    const auto pick = [](uint32_t low, uint32_t high, auto&& selector) {
      return __byte_perm(low, high,
                         selector(0) | selector(1) << 4 | selector(2) << 8 | selector(3) << 12);
    };
    if constexpr (kBits == 1) {
      return run[0];
    } else if constexpr (kBits == 3) {  // bytes of the first two words, then of the third
      const uint32_t two = pick(run[0], run[1], [&](int i) { return (first + 3 * i) % 8; });
      return pick(two, run[2], [&](int i) { return first + 3 * i < 8 ? i : first + 3 * i - 4; });
    } else {
      // Two octets at a time: byte `at` of each, then byte at + 1, which six bits need: `at` is even then, so that both
      // lie in one word.
      const int even = kBits == 6 ? first / 2 * 2 : first;
      const auto two = [&](int at) {
        return pick(run[at / 4], run[(at + kBits) / 4],
                    [&](int i) { return i % 2 ? 4 + (at + kBits + i / 2) % 4 : (at + i / 2) % 4; });
      };
      return __byte_perm(two(even), two(even + 2 * kBits), first == even ? 0x5410 : 0x7632);
    }
  }
};

}  // namespace jaxgemv::cuda
