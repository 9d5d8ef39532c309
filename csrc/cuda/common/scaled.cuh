// Codes of 16-entry tables whose scale is multiplied into the operand: the mma multiplies entry times scale. One-byte
// scales have four significant bits at most, so these products are exact in fp16, and a group's end needs no work.
#pragma once

#include "formats.cuh"
#include "powers.cuh"
#include "table16.cuh"

namespace jaxgemv::cuda {

__device__ __forceinline__ __half2 half2_of(uint32_t bits) {
  return reinterpret_cast<const __half2&>(bits);
}
__device__ __forceinline__ uint32_t bits_of(__half2 pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}

// Interface of the decoders below, each with the pairs of WordPairs<4>:
//   product(word, p, half, scale)  `scale` is that of all codes of the word, in both halves
//   kTop, kSpread  scales from 2^kTop down to 2^(kTop - kSpread + 1) are exact times any entry
//   kE4M3          and so is any scale of e4m3 times this
//   worth()        factor of the decoded numbers, besides the table's unit

// E2M1: its bits, put where fp16 has the sign, the exponent and the first bit of the mantissa, are the number times
// 2^-14, for zero and the subnormal too.
struct E2M1Decoder {
  static constexpr int kTop = 15, kSpread = 25;
  static constexpr float kE4M3 = 1, kWorth = 0x1p14f;
  static __device__ __forceinline__ float worth() { return kWorth; }

  static __device__ __forceinline__ uint32_t product(uint32_t word, int p, int half,
                                                     __half2 scale) {
    // A byte for every second code: its sign is bit 7, its other bits are 3 .. 1.
    const uint32_t sign = p ? word : word << 4, others = p ? word >> 3 : word << 1;
    uint32_t bytes;  // (sign & c) | (others & ~c), in one instruction for both halves
    asm("lop3.b32 %0, %1, %2, 0x80808080, 0xe4;" : "=r"(bytes) : "r"(sign), "r"(others));
    return bits_of(__hmul2(half2_of((half ? bytes : bytes << 8) & 0x8e008e00u), scale));
  }
};

// A Decoder (formats.cuh) of octets of E2M1, each with its scale.
struct ScaledOctet : PlainDecoder {
  static constexpr bool kRuns = true;
  static constexpr float kWorth = 1;
  static __device__ constexpr int code(int p, int e) { return p + 4 * e; }
  __device__ __forceinline__ explicit ScaledOctet(const uint8_t*) {}
  static __device__ __forceinline__ void decode(uint32_t word, __half2 scale, uint32_t (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) a[p] = E2M1Decoder::product(word, p % 2, p / 2, scale);
  }
};

// The factor that the table is times E2M1, or 0 if it is another table. Called by a whole warp, entry l % 16 in lane l.
__device__ __forceinline__ float factor_of_e2m1(float entry) {
  const uint32_t code = threadIdx.x % 16, bits = (code & 7) << 9 | (code & 8) << 12;
  const float number = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const float factor = __shfl_sync(~0u, entry, 2);
  const bool is = entry == factor * (number * E2M1Decoder::kWorth) && fabsf(factor) >= 0x1p-120f;
  return __all_sync(~0u, is) ? factor : 0;
}

// One plane of a table of any entries; all planes add up to an entry in fixed point: first - 64 + second / 128 + third
// / 128^2 ..
struct PlaneDecoder : Plane16 {
  static constexpr int kTop = 5, kSpread = 20;
  static constexpr float kE4M3 = 0x1p-4f;

  PlaneDecoder() = default;
  __device__ __forceinline__ PlaneDecoder(uint32_t number, int plane)
      : Plane16(number),
        offset_(__float2half2_rn(plane > 0 ? -1024.f : -1088.f)),
        worth_(power_of_two(-7 * plane)) {}
  __device__ __forceinline__ float worth() const { return worth_; }

  __device__ __forceinline__ uint32_t product(uint32_t word, int p, int half, __half2 scale) const {
    // Codes n and n + 4; 0x6400 | q is 1024 + q.
    const int n = p + 2 * half;
    const uint32_t pair = __byte_perm(look_up(word, 0), look_up(word, 1), n | (n + 4) << 8);
    const __half2 number = half2_of((pair & 0x00ff00ffu) | 0x64006400u);
    return bits_of(__hfma2(number, scale, __hmul2(scale, offset_)));
  }

 private:
  __half2 offset_;
  float worth_;
};

// The traits of Codes<.., __half> in codes.cuh, for XPairs. Whether a table is E2M1 is seen from its entries alone.
struct ScaledCodes : WordPairs<4>, WithoutTable {
  static constexpr bool kHasSums = false, kTakesScales = true;
  static constexpr int kPlanes = 1;
  static constexpr float kWorth = 1, kOfSecond = 1;

  ScaledCodes() = default;
  // Loads the table of stack matrix s, and the global scale if it is one number, which the table's unit then includes.
  // Called by a whole warp, as is settle(), which waits for the loads.
  __device__ __forceinline__ ScaledCodes(const Param& table, const Param& global, Index s)
      : bits_(entry_bits(table, s)),
        global_bits_(is_factor(global)
                         ? load_bits(global.data, global.dtype, offset_of(global, s, 0, 0))
                         : 0) {}

  static JAXGEMV_HD bool is_factor(const Param& global) {
    return global.data != nullptr && global.n_stride == 0;
  }

  // Planes of an entry beside 16-bit x, to 2^-14 of the largest entry, and beside float32 x, to 2^-26.
  static constexpr int kFew = 2, kMany = 4;

  __device__ __forceinline__ void settle(Dtype dtype, const Param& global, int planes) {
    const float entry = float_of_bits(bits_, dtype);
    float unit = factor_of_e2m1(entry);
    is_e2m1_ = unit != 0;
    if (!is_e2m1_) {
      float most = fabsf(entry);
#pragma unroll
      for (int i = 1; i < 16; i *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
      // A power of two as unit, if all entries are exact in it.
      unit = fmaxf(__uint_as_float(__float_as_uint(most) & 0x7f800000u) / 32, 0x1p-126f);
      if (planes == kFew && !__all_sync(~0u, entry / unit * 128 == rintf(entry / unit * 128)))
        unit = fmaxf(most * (128 / 8191.f), 0x1p-126f);
      float left = entry / unit * 128;
      for (int plane = 0; plane < planes; plane += 2) {
        const float two = plane + 2 < planes ? floorf(left) : rintf(left);
        const uint32_t fixed = min(__float2int_rn(two) + (plane > 0 ? 0 : 64 * 128), 16383);
        facts().planes[plane] = {fixed >> 7, plane};
        facts().planes[plane + 1] = {fixed & 127, plane + 1};
        left = (left - two) * (128 * 128);
      }
      // NaN for all weights, not for one entry alone: codes are not looked at again.
      if (!__all_sync(~0u, fabsf(entry) < INFINITY)) unit = NAN;
    }
    facts().unit = is_factor(global) ? unit * float_of_bits(global_bits_, global.dtype) : unit;
    __syncwarp();
  }

  // Whether the table is E2M1 times any factor.
  __device__ __forceinline__ bool is_e2m1() const { return is_e2m1_; }
  static __device__ __forceinline__ PlaneDecoder plane(int i) { return facts().planes[i]; }
  static __device__ __forceinline__ float unit() { return facts().unit; }

 private:
  uint32_t bits_, global_bits_;
  bool is_e2m1_;

  // In shared memory: rarely used, and registers are few. All warps write the same values.
  struct Facts {
    PlaneDecoder planes[kMany];
    float unit;
  };
  static __device__ __forceinline__ Facts& facts() {
    __shared__ Facts facts;
    return facts;
  }
};

}  // namespace jaxgemv::cuda
