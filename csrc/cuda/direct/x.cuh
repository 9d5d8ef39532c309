// x as operand B of the direct kernel, straight from memory: lane (g, t) = (lane / 4, lane % 4) has
// octet t of four, of row g of a tile of eight.
#pragma once

#include "../common/norm.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kTileM = 8;  // rows of x

// An octet of a row, as kParts numbers of Element that add up: exact, and so are products with codes.
template <typename X>
struct Octet16 {
  using Element = X;
  static constexpr int kParts = 1;
  uint4 raw = {};

  __device__ __forceinline__ void ask(const X* from) { raw = load16(from); }

  __device__ __forceinline__ void get(float (&to)[8]) const { get_halves(raw, kDtypeOf<X>, to); }

  // Of two mmas: pairs of elements p and p + 4 of the octet, p = 0, 1 and 2, 3.
  __device__ __forceinline__ void pairs(uint32_t (&b)[kParts][2][2]) const {
    b[0][0][0] = __byte_perm(raw.x, raw.z, 0x5410), b[0][0][1] = __byte_perm(raw.x, raw.z, 0x7632);
    b[0][1][0] = __byte_perm(raw.y, raw.w, 0x5410), b[0][1][1] = __byte_perm(raw.y, raw.w, 0x7632);
  }
};

template <typename X>
struct XOctet : Octet16<X> {};

// Three bfloat16 have the 24 bits of a float32.
template <>
struct XOctet<float> {
  using Element = __nv_bfloat16;
  static constexpr int kParts = 3;
  uint4 raw[2] = {};

  __device__ __forceinline__ void ask(const float* from) {
    raw[0] = load16(from), raw[1] = load16(from + 4);
  }

  __device__ __forceinline__ void get(float (&to)[8]) const {
    const uint4 low = raw[0], high = raw[1];
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = __uint_as_float(words[i]);
  }

  // Returns the sum.
  __device__ __forceinline__ float pairs(uint32_t (&b)[kParts][2][2]) const {
    float v[8];
    get(v);
    return pairs_of(v, b);
  }

  static __device__ __forceinline__ float pairs_of(const float (&v)[8],
                                                   uint32_t (&b)[kParts][2][2]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t low = __float_as_uint(v[p]), high = __float_as_uint(v[p + 4]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        b[part][p / 2][p % 2] = __byte_perm(low, high, 0x7632);
        low = rest_of(low), high = rest_of(high);
      }
    }
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }

 private:
  // What the upper half leaves.
  static __device__ __forceinline__ uint32_t rest_of(uint32_t bits) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & 0xffff0000u));
  }
};

// An octet of norm, for all rows of x.
struct NormOctet {
  uint4 raw[2] = {};

  __device__ __forceinline__ void ask(const NormValues& norm, int k) {
    const char* const from = norm.data + k * size_of(norm.dtype);
    raw[0] = load16(from);
    if (norm.dtype == Dtype::kF32) raw[1] = load16(from + 16);
  }

  __device__ __forceinline__ void get(Dtype dtype, float (&to)[8]) const {
    if (dtype == Dtype::kF32)
      XOctet<float>{{raw[0], raw[1]}}.get(to);
    else
      get_halves(raw[0], dtype, to);
  }
};

// x * norm as float32 x is, and its sum; adds the squares of x.
template <typename X>
__device__ __forceinline__ float normed_pairs(const XOctet<X>& octet, const float (&norm)[8],
                                              float& squares,
                                              uint32_t (&b)[XOctet<float>::kParts][2][2]) {
  float v[8];
  octet.get(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares), v[i] *= norm[i];
  return XOctet<float>::pairs_of(v, b);
}

// From what lanes (g, t) have of row g's sum to where results of columns 2 t and 2 t + 1 lie.
__device__ __forceinline__ void spread(float (&sum)[4]) {
  float all = sum[0];
  all += __shfl_xor_sync(~0u, all, 1);
  all += __shfl_xor_sync(~0u, all, 2);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = __shfl_sync(~0u, all, threadIdx.x % 4 * 8 + e % 2 * 4);
}

}  // namespace jaxgemv::cuda::direct
