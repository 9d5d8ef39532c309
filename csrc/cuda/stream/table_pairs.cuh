// Tables of 16 entries in shared memory, by pairs: a byte, which is two codes, finds both entries with one load. (In
// registers, as in table16.cuh, a code takes two permutes.)
#pragma once

#include "../common/code_bytes.cuh"
#include "../common/powers.cuh"
#include "../common/ptx.cuh"
#include "../common/table16.cuh"

namespace jaxgemv::cuda::stream {

// Whether this is code for GPUs with 200 KB of shared memory and more: these compute capabilities.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10
constexpr bool kLargeShared = true;
#else
constexpr bool kLargeShared = false;
#endif
constexpr bool has_large_shared(int major) { return major == 9 || major == 10; }

// Bytes from a pair to the next. With 256, of which a lane has 4 or 8, a byte of codes is a byte of its address.
constexpr int pair_stride(bool large_shared) { return large_shared ? 256 : 128; }

// The table: a word for each pair of codes and each lane, in a bank of the lane's own.
class Pairs {
 public:
  __device__ __forceinline__ float unit() const { return unit_; }

 protected:
  static constexpr int kStride = pair_stride(kLargeShared);
  float unit_;

  Pairs() = default;
  __device__ __forceinline__ explicit Pairs(uint8_t* shared)
      : lane_bytes_(threadIdx.x % 32 * 4), table_(shared) {}

  // Writes the pairs of all entries, `half` being this lane's, 16 bits. Called by all warps, which then have to meet;
  // half a warp writes a pair. (With eight lanes for each some kernels keep registers in memory.)
  __device__ __forceinline__ void put(uint32_t half, int at = 0) const {
#pragma unroll 1
    for (int second = static_cast<int>(threadIdx.x / 32); second < 16; second += blockDim.x / 32) {
      const uint32_t upper = __shfl_sync(~0u, half, second) << 16;
#pragma unroll 4
      for (int i = 0; i < 8; ++i) {
        const int first = 2 * i + threadIdx.x % 32 / 16;
        const uint32_t pair = upper | __shfl_sync(~0u, half, first);
        *reinterpret_cast<uint2*>(table_ + (16 * second + first) * kStride + threadIdx.x % 16 * 8 +
                                  at) = {pair, pair};
      }
    }
  }
  // The pair for byte `byte` of a word of codes.
  __device__ __forceinline__ uint32_t get(uint32_t word, int byte, int at = 0) const {
    uint32_t place;
    if constexpr (kStride == 256)
      place = __byte_perm(word, lane_bytes_, 0x5504 | byte << 4);
    else
      place = ((byte == 0 ? word << 7 : word >> (8 * byte - 7)) & 0x7f80) | lane_bytes_;
    return *reinterpret_cast<const uint32_t*>(table_ + place + at);
  }

 private:
  uint32_t lane_bytes_;
  uint8_t* table_;
};

// The power of two that brings a table's largest entry under 2^15, and its inverse, which is NaN where not all are
// finite: codes are not looked at again.
struct TableScale {
  float scale, unit, largest;

  // By a whole warp. most: a limit on the largest entry after scaling, if it is to be less.
  __device__ __forceinline__ explicit TableScale(float entry, float most = 0x1p15f) {
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(entry) & 0x7fffffffu);
    int exponent = normal_exponent<float>(bits, 15);
    if (__uint_as_float(bits) * power_of_two(exponent) > most) --exponent;
    scale = power_of_two(exponent), unit = bits < 0x7f800000u ? power_of_two(-exponent) : NAN;
    largest = __uint_as_float(bits) * scale;
  }
};

// For one and two rows of x. Entries are numbers of 16 bits, 256 times a signed byte plus another one: within 2^-15 of
// the largest, or if that is no power of two, 2^-14. The two bytes are neighbours in A. The three 8-bit digits of x
// are in columns of B, each worth 256 times as much as the one before: where a digit meets the higher byte, it is one
// column further on.
class DigitPairs : public OneSum, public Pairs {
 public:
  static constexpr int kSteps = 4, kTableBytes = 256 * kStride;
  static constexpr bool kSigned = true, kHasSums = false;
  static constexpr int table_bytes_on(int major) {
    return 256 * pair_stride(has_large_shared(major));
  }

  DigitPairs() = default;
  __device__ __forceinline__ DigitPairs(uint32_t bits, Dtype dtype, uint8_t* shared, bool)
      : Pairs(shared) {
    const float entry = float_of_bits(bits, dtype);
    const TableScale by(entry, 127 * 256 + 127);
    unit_ = by.unit;
    const int fixed = __float2int_rn(entry * by.scale), high = (fixed + 128) >> 8;
    put((high & 0xff) | (fixed & 0xff) << 8);
  }

  static __device__ constexpr int code(int four, int i) { return 4 * four + i; }  // used to order x
  __device__ __forceinline__ uint32_t quad(uint32_t word, int step) const {
    return get(word, step);
  }
  using Pairs::unit;  // not OneSum's
};

// For more rows of x. Entries are one fp16 if some factor makes them exact enough, or else the sum of two.
class HalfPairs : public Pairs {
 public:
  static constexpr int kWordCodes = 8, kProducts = 2, kPlanes = 2;
  static constexpr int kTableBytes = 256 * kStride;
  static constexpr bool kHasSums = false, kTakesScales = false;
  static constexpr float kWorth = 1, kOfSecond = 1;
  static constexpr int table_bytes_on(int major) {
    return has_large_shared(major) ? 256 * pair_stride(true) : 0;
  }

  HalfPairs() = default;
  // wide: x is float32.
  __device__ __forceinline__ HalfPairs(uint32_t bits, Dtype dtype, uint8_t* shared, bool wide)
      : Pairs(shared) {
    const float entry = float_of_bits(bits, dtype);
    const TableScale by(entry);
    float scaled = entry * by.scale;
    const float factor = factor_of_halves(scaled, by.largest, !wide);
    has_low_ = factor == 0;
    scaled *= has_low_ ? 1 : factor;
    unit_ = has_low_ ? by.unit : by.unit / factor;
    const __half high = __float2half_rn(scaled);
    put(__half_as_ushort(high));
    if (has_low_) put(__half_as_ushort(__float2half_rn(scaled - __half2float(high))), kOfLow);
  }

  static __device__ constexpr int code(int p, int half, int e) { return 4 * p + 2 * half + e; }
  __device__ __forceinline__ uint32_t product(uint32_t word, int plane, int p, int half) const {
    return get(word, 2 * p + half, plane * kOfLow);
  }
  __device__ __forceinline__ bool has(int plane) const { return plane == 0 || has_low_; }

 private:
  static constexpr int kOfLow = 128;
  bool has_low_;
};

// Codes for more than two rows of x. Where there is little shared memory tables are in registers.
template <Format kFormat, int kBits, typename Element>
using PairCodes = std::conditional_t<kFormat == Format::kCodebook && kLargeShared, HalfPairs,
                                     Codes<kFormat, kBits, Element>>;

}  // namespace jaxgemv::cuda::stream
