// x as operand B of mma.m16n8k16, for the mma kernel: straight from memory, in the order of k in
// which Codes<..>::product has the weights.
#pragma once

#include "../common/codes.cuh"
#include "../common/norm.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::mma {

// x as it is. load(): the registers b[part][product] that meet a word, from the x of its codes on.
template <int kBits, typename X>
struct XAsIs {
  using Kind = X;
  using C = Codes<Format::kAffine, kBits, Kind>;
  static constexpr int kSplit = 1;  // parts whose sum is x
  using Registers = uint32_t[kSplit][C::kProducts][2];

  __device__ __forceinline__ XAsIs(const NormValues&) {}

  __device__ __forceinline__ void load(const X* x, int, bool inside, Registers& b, float&) const {
    constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // the halves of two registers
    if constexpr (kBits == 4) {
      const uint4 v = inside ? load16(x) : uint4{};
      b[0][0][0] = __byte_perm(v.x, v.z, kLow), b[0][0][1] = __byte_perm(v.y, v.w, kLow);
      b[0][1][0] = __byte_perm(v.x, v.z, kHigh), b[0][1][1] = __byte_perm(v.y, v.w, kHigh);
    } else {
      const uint2 v = inside ? load8(x) : uint2{};
      b[0][0][0] = __byte_perm(v.x, v.y, kLow), b[0][0][1] = __byte_perm(v.x, v.y, kHigh);
    }
  }
};

// x * norm as three bfloat16, 24 bits, which need no power of two. Adds the squares of x up.
template <int kBits, typename X>
struct XNormed {
  using Kind = __nv_bfloat16;
  using C = Codes<Format::kAffine, kBits, Kind>;
  static constexpr int kSplit = 3;
  using Registers = uint32_t[kSplit][C::kProducts][2];
  const NormValues& norm;

  __device__ __forceinline__ XNormed(const NormValues& norm) : norm(norm) {}

  __device__ __forceinline__ void load(const X* x, int k, bool inside, Registers& b,
                                       float& squares) const {
    float v[C::kWordCodes] = {};
    if (inside) {
      norm.load(v, k);
#pragma unroll
      for (int i = 0; i < C::kWordCodes; ++i) {
        const float value = to_float(x[i]);
        squares = fmaf(value, value, squares), v[i] *= value;
      }
    }
#pragma unroll
    for (int split = 0; split < kSplit; ++split)
#pragma unroll
      for (int p = 0; p < C::kProducts; ++p)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &low = v[C::code(p, half, 0)], &high = v[C::code(p, half, 1)];
          const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
          low -= __low2float(pair), high -= __high2float(pair);
          b[split][p][half] = reinterpret_cast<const uint32_t&>(pair);
        }
  }
};

}  // namespace jaxgemv::cuda::mma
