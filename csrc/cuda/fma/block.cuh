// 32 codes of a row, which are kBits words for every width.
#pragma once

#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::fma {

constexpr int kBlock = 32;

template <int kBits>
struct Block {
  uint32_t words[kBits];

  // Loads a block of a row that is whole blocks, and aligned.
  __device__ __forceinline__ void load(const uint32_t* from) {
    load_words<kBits, true>(from, words);
  }

  // Loads a block from any place, with `count` words left in the row; zeros behind these.
  __device__ __forceinline__ void load(const uint32_t* from, int count) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = i < count ? __ldg(from + i) : 0;
  }
};

}  // namespace jaxgemv::cuda::fma
