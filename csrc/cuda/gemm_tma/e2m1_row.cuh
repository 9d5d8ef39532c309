// A row of E2M1 with scales of one byte, mxfp4 and nvfp4: such a weight has six significant bits at most, so that pairs
// of x's dtype hold it as float32 would, and take no table.
#pragma once

#include "../common/scaled.cuh"
#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Whether a table of Numbers is E2M1. Called by a whole warp.
__device__ __forceinline__ bool is_e2m1(const float* table) {
  return factor_of_e2m1(table[threadIdx.x % 16 * 32]) == 1;
}

// Row n of matrix s, with the interface of RoundedRow. X: half or bfloat16.
template <typename X>
class E2M1Row {
  static constexpr bool kIsHalf = std::is_same_v<X, __half>;

 public:
  static constexpr bool kHasAlikeStages = false;

  __device__ __forceinline__ E2M1Row(const Params& params, int s, int n, const QuadScales& scales)
      : scales_(scales),
        row_(params.scales[0].row(s, n)),
        row_bytes_((params.x.K * scales.bytes + kQuadK - 1) / kQuadK),
        are_powers_(params.scales[0].dtype == Dtype::kE8M0) {}

  __device__ __forceinline__ void ask(int k) {
    const int first = k * scales_.bytes / kQuadK;
    // Codes behind the end of a row meet zeros of x: any scale will do.
    asked_[0] = asked_[1] = kAnyNumbers;
    if (scales_.piece == 4) {
      if (first < row_bytes_) asked_[0] = at<uint32_t>(first);
      if (scales_.bytes == 8 && first + 4 < row_bytes_) asked_[1] = at<uint32_t>(first + 4);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (2 * i < scales_.bytes && first + 2 * i < row_bytes_)
          asked_[i / 2] =
              __byte_perm(asked_[i / 2], at<uint16_t>(first + 2 * i), i % 2 == 0 ? 0x3254 : 0x5410);
    }
  }
  __device__ __forceinline__ void take(int) {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      now_[i] = asked_[i];
      const uint32_t clamped =
          __vminu4(__vmaxu4(now_[i], kLeastPower * 0x01010101u), kLargestPower * 0x01010101u);
      fits &= clamped == now_[i];
    }
    fits_ = !are_powers_ || __all_sync(~0u, fits);
  }
  __device__ __forceinline__ void put(int octet, uint32_t codes, uint32_t, uint32_t row,
                                      uint32_t swizzle) {
    if (octet % 2 == 0) {
      scale_byte_ = 0xff & (scales_.bytes == 8 ? now_[octet / 8] >> (octet / 2 % 4 * 8)
                                               : now_[0] >> (octet / 4 * 8));
      scale_ = pair_of(scale_byte_);
    }
    uint32_t w[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      // Twice byte p of codes << 4 in the low half, of codes in the high half: the upper four bits of a half are a
      // code.
      const uint32_t codes_of_pair =
          __byte_perm(codes << 4, codes, p | p << 4 | (4 + p) << 8 | (4 + p) << 12);
      // Put where X has sign, exponent and the first bit of the mantissa, codes are the number times 1 / kUp.
      constexpr uint32_t kSigns = 0x80008000u, kMask = kIsHalf ? 0x8e008e00u : 0x81c081c0u;
      const uint32_t shifted = codes_of_pair >> (kIsHalf ? 3 : 6);
      w[p] = ((codes_of_pair & kSigns) | (shifted & ~kSigns)) & kMask;
      w[p] = product(w[p], kUp);
    }
    if (fits_) {
#pragma unroll
      for (int p = 0; p < 4; ++p) w[p] = product(w[p], scale_);
    } else {
      const float scale = float_of_byte(scale_byte_, are_powers_ ? Dtype::kE8M0 : Dtype::kE4M3);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 both = floats_of(w[p]);
        w[p] = rounded_pair<X>(both.x * scale, both.y * scale);
      }
    }
    store_shared16(row + (octet % (128 / 16) * 16 ^ swizzle), {w[0], w[1], w[2], w[3]});
  }

 private:
  // kUp: 2^14 or 2^126, in both halves. Least and largest byte of e8m0 that is a normal number of X, for which a
  // product is right.
  static constexpr uint32_t kUp = kIsHalf ? 0x74007400u : 0x7e807e80u;
  static constexpr uint32_t kLeastPower = kIsHalf ? 127 - 14 : 1,
                            kLargestPower = kIsHalf ? 127 + 15 : 254;
  static constexpr uint32_t kAnyNumbers = 0x78787878u;  // 2^-7 as e8m0, 2^8 as e4m3
  const QuadScales scales_;
  const char* const row_;
  const int row_bytes_;
  const bool are_powers_;
  uint32_t asked_[2], now_[2] = {}, scale_byte_ = 0, scale_ = 0;
  bool fits_ = true;

  template <typename Piece>
  __device__ __forceinline__ uint32_t at(int byte) const {
    return __ldg(reinterpret_cast<const Piece*>(row_ + byte));
  }
  // A scale that fits, in both halves.
  __device__ __forceinline__ uint32_t pair_of(uint32_t byte) const {
    if (are_powers_)
      return kIsHalf ? byte * 0x04000400u - (127 - 15) * 0x04000400u : byte * 0x00800080u;
    const uint32_t half = pair_of_float8<Format::kE4M3>(byte);
    if (kIsHalf) return __byte_perm(half, 0, 0x1010);
    const float number = __low2float(half2_of(half));
    return rounded_pair<X>(number, number);
  }
  // The product of pairs; not by __hmul2, whose numbers of bfloat16 come apart beside a branch.
  static __device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
    uint32_t pair;
    if constexpr (kIsHalf)
      asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    else
      asm("mul.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
  }
  static __device__ __forceinline__ float2 floats_of(uint32_t pair) {
    if constexpr (kIsHalf) return __half22float2(half2_of(pair));
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
