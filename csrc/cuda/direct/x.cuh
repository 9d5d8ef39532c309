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

  __device__ __forceinline__ void get(float (&to)[8]) const {
    get_octet({raw, {}}, kDtypeOf<X>, to);
  }

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

  __device__ __forceinline__ void get(float (&to)[8]) const { get_octet(raw, Dtype::kF32, to); }

  // As Octet16 has it, of eight values.
  static __device__ __forceinline__ void pairs_of(const float (&v)[8],
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
};

// x becomes x * norm; adds the squares of x.
__device__ __forceinline__ void apply(const NormOctet& norm, Dtype dtype, float (&x)[8],
                                      float& squares) {
  float factors[8];
  get_octet(norm.raw, dtype, factors);
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares), x[i] *= factors[i];
}

__device__ __forceinline__ float sum_of(const float (&v)[8]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// What lanes (g, t) have of row g, together.
__device__ __forceinline__ float over_row(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// The same where results of columns 2 t and 2 t + 1 lie.
__device__ __forceinline__ void spread(float (&sum)[4]) {
  const float all = over_row(sum[0]);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = __shfl_sync(~0u, all, threadIdx.x % 4 * 8 + e % 2 * 4);
}

}  // namespace jaxgemv::cuda::direct
