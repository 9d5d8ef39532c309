// 32 codes of a row, which are kBits words for every width.
#pragma once

#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::fma {

constexpr int kBlock = 32;

template <int kBits>
struct Block {
  // Loads of 16 or 8 bytes, where rows are whole ones.
  static constexpr int kVector = kBits % 4 == 0 ? 4 : kBits % 2 == 0 ? 2 : 1;
  uint32_t words[kBits];

  __device__ __forceinline__ void load(const uint32_t* from) {
#pragma unroll
    for (int i = 0; i < kBits; i += kVector) {
      if constexpr (kVector == 4) {
        const uint4 v = load_stream(from + i);
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      } else if constexpr (kVector == 2) {
        const uint2 v = load8(from + i);
        words[i] = v.x, words[i + 1] = v.y;
      } else {
        words[i] = __ldg(from + i);
      }
    }
  }

  // At any place, of which `count` words are left of the row; zeros behind it.
  __device__ __forceinline__ void load(const uint32_t* from, int count) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = i < count ? __ldg(from + i) : 0;
  }
};

}  // namespace jaxgemv::cuda::fma
