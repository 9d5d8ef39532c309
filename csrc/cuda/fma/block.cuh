// 32 codes of a row, which are kBits words for every width.
#pragma once

#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::fma {

constexpr int kBlock = 32;

template <int kBits>
struct Block {
  uint32_t words[kBits];

  // Of rows of whole blocks.
  __device__ __forceinline__ void load(const uint32_t* from) {
    load_words<kBits, true>(from, words);
  }

  // At any place, of which `count` words are left of the row; zeros behind it.
  __device__ __forceinline__ void load(const uint32_t* from, int count) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = i < count ? __ldg(from + i) : 0;
  }
};

}  // namespace jaxgemv::cuda::fma
