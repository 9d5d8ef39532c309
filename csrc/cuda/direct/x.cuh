// x as operand B of the direct kernel, straight from memory: lane (g, t) = (lane / 4, lane % 4) has
// octet t of four, of row g of a tile of eight.
#pragma once

#include "../common/params.cuh"
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

  __device__ __forceinline__ void pairs(uint32_t (&b)[kParts][2][2]) const {
    const uint32_t bits[2][4] = {{raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                                 {raw[1].x, raw[1].y, raw[1].z, raw[1].w}};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t low = bits[0][p], high = bits[1][p];
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

}  // namespace jaxgemv::cuda::direct
