// Octets, eight elements, of kRowsM rows of x, loaded straight from memory.
#pragma once

#include "../common/params.cuh"

namespace jaxgemv::cuda::fma {

template <typename X, int kRowsM>
class XOctet {
  static constexpr int kWords = kOctet * sizeof(X) / 4;

 public:
  // Loads elements k to k + 7 of rows that are aligned to 16 bytes.
  __device__ __forceinline__ void load(const X* const (&rows)[kRowsM], int k) {
#pragma unroll
    for (int m = 0; m < kRowsM; ++m)
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(rows[m] + k) + i / 4);
        words_[m][i] = v.x, words_[m][i + 1] = v.y, words_[m][i + 2] = v.z, words_[m][i + 3] = v.w;
      }
  }

  // Loads those of rows with any alignment, with `count` elements left; zeros behind these.
  __device__ __forceinline__ void load(const X* const (&rows)[kRowsM], int k, int count) {
#pragma unroll
    for (int m = 0; m < kRowsM; ++m)
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (sizeof(X) == 4) {
          const auto* words = reinterpret_cast<const uint32_t*>(rows[m] + k);
          words_[m][i] = i < count ? __ldg(words + i) : 0;
        } else {
          const auto* halves = reinterpret_cast<const unsigned short*>(rows[m] + k);
          const uint32_t low = 2 * i < count ? __ldg(halves + 2 * i) : 0;
          words_[m][i] = 2 * i + 1 < count ? low | uint32_t{__ldg(halves + 2 * i + 1)} << 16 : low;
        }
      }
  }

  __device__ __forceinline__ float value(int m, int j) const {
    if constexpr (sizeof(X) == 4) return __uint_as_float(words_[m][j]);
    const uint32_t word = words_[m][j / 2];
    if constexpr (std::is_same_v<X, __nv_bfloat16>)
      return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    else
      return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> j % 2 * 16)));
  }

 private:
  uint32_t words_[kRowsM][kWords];
};

}  // namespace jaxgemv::cuda::fma
