// Integers as bytes, for the integer mma.
#pragma once

#include "codes.cuh"

namespace jaxgemv::cuda {

// An integer on top of kMagic, read as a float, is its value on top of 1.5 * 2^23.
constexpr int kMagic = 0x4b400000;
__device__ __forceinline__ float float_of_magic(int sum) { return __int_as_float(sum) - 0x1.8p23f; }

// Four codes in the bytes of a register; all steps of a unit, a word or an octet, have all codes.
//   code(step, i)     the code of the unit that is byte i
//   kUp               how many places up all codes are
//   kSums             of products: one, or one for each step; they begin with start()
//   total(sums, e)    of element e of all of them
//
// Where a byte is whole codes they stay at their places, times 2^(kBits * step).
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

// Where all steps of a unit have the same place, so that one sum has them all.
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

// Of other widths they come down to the same place. The halves of an octet are drawn apart, first to two codes
// each 16 bits and then to one each 8.
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

// Of a run, four octets in kBits words: a register has the bytes with the same place in each, and with its neighbour
// the same codes. These go up to the top of their bytes, since shifts to the left are products, on another unit.
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
  // Byte `first` of each octet.
  static __device__ __forceinline__ uint32_t bytes(const uint32_t (&run)[kBits], int first) {
    // Those bytes of a pair of words, or what takes its place, that selector i of four says.
    const auto pick = [](uint32_t low, uint32_t high, auto&& selector) {
      return __byte_perm(low, high,
                         selector(0) | selector(1) << 4 | selector(2) << 8 | selector(3) << 12);
    };
    if constexpr (kBits == 1) {
      return run[0];
    } else if constexpr (kBits == 3) {  // of the first two words, then of the third
      const uint32_t two = pick(run[0], run[1], [&](int i) { return (first + 3 * i) % 8; });
      return pick(two, run[2], [&](int i) { return first + 3 * i < 8 ? i : first + 3 * i - 4; });
    } else {
      // Two by two; of six bits with the next byte of each, which lies in the same word.
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
