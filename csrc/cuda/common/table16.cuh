// Tables of 16 entries in registers: two prmt find four entries, so that no code costs a load.
#pragma once

#include "formats.cuh"

namespace jaxgemv::cuda {

__device__ __forceinline__ uint32_t prmt(uint32_t low, uint32_t high, uint32_t nibbles) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
  return bytes;
}

// 16 numbers of 7 bits. Where a selector's fourth bit is set prmt returns the sign of a byte, which is zero here, so
// the lookups in the two halves of the table can be ORed.
class Plane16 {
 public:
  Plane16() = default;
  // Called by a whole warp: lane l has number l % 16.
  __device__ __forceinline__ explicit Plane16(uint32_t number) {
    uint32_t four = number << (threadIdx.x % 4 * 8);
#pragma unroll
    for (int i = 1; i < 4; i *= 2) four |= __shfl_xor_sync(~0u, four, i);
    // Not by __reduce_or_sync, whose uniform registers would be copied for each prmt.
#pragma unroll
    for (int i = 0; i < 4; ++i) fours_[i] = __shfl_sync(~0u, four, 4 * i);
  }

  // The numbers of four codes of a word, in order: of its first four (half 0), or of the others.
  __device__ __forceinline__ uint32_t look_up(uint32_t word, int half) const {
    return part_of(word, half, 0) | part_of(word, half, 1);
  }

 private:
  uint32_t fours_[4];

  // Part 0 gives zeros for codes of 8 and more, part 1 for those below.
  __device__ __forceinline__ uint32_t part_of(uint32_t word, int half, int part) const {
    const uint32_t codes = part ? word ^ 0x88888888u : word;
    // A multiplication in place of a shift by 16: the shift units are busy.
    return prmt(fours_[2 * part], fours_[2 * part + 1], half ? __umulhi(codes, 0x10000) : codes);
  }
};

// Table entries in fixed point, to 2^-14 of the largest: unit * (least + high + low / 128). Those of E2M1 are high
// alone.
class Table16 : public WithoutTable {
 public:
  static constexpr int kPlanes = 2;
  static constexpr float kOfSecond = 1.f / 128;
  static constexpr bool kHasSums = true, kTakesScales = false;

  Table16() = default;

  // Called by a whole warp, for the table of stack matrix s.
  __device__ __forceinline__ Table16(const Param& table, Index s) {
    const int lane = threadIdx.x % 32;
    const float entry = load(table, s, lane % 16, 0);
    float most = entry, least = entry, unit;
#pragma unroll
    for (int i = 1; i < 16; i *= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
      least = fminf(least, __shfl_xor_sync(~0u, least, i));
    }
    const float range = most - least, above = entry - least;
    const float finest = fmaxf(fmaxf(most, -least) * 0x1p-17f, 0x1p-126f);
    // A power of two as unit, if high alone is exact in it.
    unit = fmaxf(__uint_as_float(max(static_cast<int>(__float_as_uint(range) >> 23) - 6, 1) << 23),
                 finest);
    has_low_ = !__all_sync(~0u, above / unit == rintf(above / unit));
    if (has_low_) unit = fmaxf(range / (16383.f / 128), finest);
    const uint32_t fixed = min(__float2int_rn(above / unit * 128), 16383);
    // NaN for all weights, not for one entry alone: codes are not looked at again.
    if (!__all_sync(~0u, fabsf(entry) < INFINITY) || !(range < INFINITY)) unit = NAN;
    shared_facts()[0] = unit, shared_facts()[1] = least / unit;
    planes_[0] = Plane16(fixed >> 7), planes_[1] = Plane16(fixed & 127);
  }

  __device__ __forceinline__ bool has(int plane) const { return plane == 0 || has_low_; }
  static __device__ __forceinline__ float unit() { return shared_facts()[0]; }
  // The least entry, in units: to be added to the number of every code.
  static __device__ __forceinline__ float least() { return shared_facts()[1]; }

 protected:
  Plane16 planes_[kPlanes];

 private:
  bool has_low_;

  // In shared memory: rarely used, and registers are few. All warps write the same values.
  static __device__ __forceinline__ float* shared_facts() {
    __shared__ float facts[2];
    return facts;
  }
};

// 7-bit numbers as the low bits of fp16, which are subnormals: n * 2^-24.
template <>
struct Codes<Format::kCodebook, 4, __half> : Table16 {
  using Table16::Table16;
  static constexpr int kWordCodes = 8, kProducts = 2;
  static constexpr float kWorth = 0x1p24f;
  static constexpr uint32_t kOnes = 0x00010001u;
  static __device__ constexpr int code(int p, int half, int e) { return 4 * p + 2 * half + e; }
  __device__ __forceinline__ uint32_t product(uint32_t word, int plane, int p, int half) const {
    return __byte_perm(planes_[plane].look_up(word, p), 0, half ? 0x4342 : 0x4140);
  }
};

}  // namespace jaxgemv::cuda
