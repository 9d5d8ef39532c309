// Scales of one byte, multiplied into operand A: all products of a quad add up, and no group needs an end of its own. A
// scale has four significant bits at most, so its product with a number of seven is exact as fp16.
#pragma once

#include "../common/formats.cuh"
#include "../image/weights.cuh"

namespace jaxgemv::cuda::wgmma_any {

using namespace image;

// Formats whose numbers may be multiplied by their scale.
//   are_short(..)  whether all numbers have so few bits, and no second part
//   kLog           scales, brought under two and times 2^kLog, keep products under 2^15
template <Format kFormat>
struct TakesScales {
  static constexpr bool kEver = false;
  static constexpr int kLog = 0;
  static __device__ __forceinline__ bool are_short(const uint8_t*, int) { return false; }
};

template <>
struct TakesScales<Format::kCodebook> {
  static constexpr bool kEver = true;
  static constexpr int kLog = 0;
  // Called by a whole warp, which looks at entry l % 16 in lane l. bits: significant bits of a scale.
  static __device__ __forceinline__ bool are_short(const uint8_t* table, int bits) {
    const int lane = threadIdx.x % 32;
    const uint32_t entry = *reinterpret_cast<const uint32_t*>(table + lane % 16 * 128 + lane * 4);
    const bool is_short = (entry & ((1u << bits) - 1)) == 0;
    return __all_sync(~0u, is_short) && !Decoder<Format::kCodebook, 4>(table).has_second();
  }
};

template <>
struct TakesScales<Format::kE4M3> {
  static constexpr bool kEver = true;
  static constexpr int kLog = 5;
  static __device__ __forceinline__ bool are_short(const uint8_t*, int) { return true; }
};

// The scales of a quad, divided by the power of two of the largest in their row. Those too small beside it for fp16 are
// left out, as zeros; any_small: whether the warp has such.
template <int kLog>
class QuadScales {
 public:
  bool any_small;

  // window: of scales, in which first_group is at byte `inside`, for row lane % 16.
  __device__ __forceinline__ QuadScales(const Params& params, const uint8_t* window, int inside,
                                        int first_group, int k) {
    const int lane = threadIdx.x % 32;
    const int half = params.groups.slots == 8 ? lane / 16 : 0;  // which of two groups in a block
    float scales[4], most = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int group = params.groups.of(k + 32 * j + 16 * half) - first_group;
      scales[j] = RowScale::value(window, lane % 16, inside + group * params.scales[0].g_bytes,
                                  params.scales[0].dtype);
      most = fmaxf(most, fabsf(scales[j]));  // fmaxf ignores NaN
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
    exponent_ = min(max(__float_as_uint(most) >> 23, 1u), 254u);
    const float back = __uint_as_float(bits_of_e8m0(254 - exponent_));
    bool small = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float part = scales[j] * back;
      const bool is_small = fabsf(part) < kSmall;
      small |= is_small && part != 0;
      pairs_[j] = __float2half2_rn(is_small ? 0 : part * static_cast<float>(1 << kLog));
    }
    any_small = __any_sync(~0u, small);
    from_ = lane / 4 + (params.groups.slots == 8 ? lane % 4 / 2 * 16 : 0);
  }

  // Multiplies the numbers of block j in row g + 8 h by their scale.
  __device__ __forceinline__ void multiply(int h, int j, uint32_t (&numbers)[4]) const {
    const __half2 scale = __shfl_sync(~0u, pairs_[j], from_ + 8 * h);
#pragma unroll
    for (uint32_t& pair : numbers) {
      const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), scale);
      pair = reinterpret_cast<const uint32_t&>(product);
    }
  }

  // The factor of the products of row g + 8 h.
  __device__ __forceinline__ float unit(int h) const {
    const uint32_t exponent = __shfl_sync(~0u, exponent_, from_ + 8 * h);
    return __uint_as_float(exponent << 23) / static_cast<float>(1 << kLog);
  }

  // Of the scales of rows g and g + 8, sets those to zero that were not left out.
  __device__ __forceinline__ void keep_small(float (&scales)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!(fabsf(scales[h]) < unit(h) * (static_cast<float>(1 << kLog) * kSmall))) scales[h] = 0;
  }

 private:
  static constexpr float kSmall = 0x1p-13f;
  uint32_t exponent_;  // of row lane % 16
  __half2 pairs_[4];
  int from_;  // a lane that has the scales of row g
};

}  // namespace jaxgemv::cuda::wgmma_any
