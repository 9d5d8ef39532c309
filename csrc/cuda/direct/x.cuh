// x as operand B of the direct kernel, straight from memory: lane (g, t) = (lane / 4, lane % 4) has
// octet t of four, of row g of a tile of eight.
#pragma once

#include "../common/norm.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kTileM = 8;  // rows of x

// An octet of a row of x. Each element is the exact sum of kParts numbers of Element, whose products with codes are
// exact too.
template <typename X>
struct Octet16 {
  using Element = X;
  static constexpr int kParts = 1;
  uint4 raw = {};

  __device__ __forceinline__ void ask(const X* from, bool inside) { raw = load16(from, inside); }

  __device__ __forceinline__ void get(float (&to)[8]) const {
    get_octet({raw, {}}, kDtypeOf<X>, to);
  }

  // The B registers of two mmas: pairs of elements p and p + 4 of the octet, p = 0, 1 and then 2, 3.
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

  __device__ __forceinline__ void ask(const float* from, bool inside) {
    raw[0] = load16(from, inside), raw[1] = load16(from + 4, inside);
  }

  __device__ __forceinline__ void get(float (&to)[8]) const { get_octet(raw, Dtype::kF32, to); }

  // The same as Octet16::pairs, from eight values.
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
  // What the upper half, as a bfloat16, leaves of a float32.
  static __device__ __forceinline__ uint32_t rest_of(uint32_t bits) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & 0xffff0000u));
  }
};

// With a norm, x * norm is treated as float32 x is (kAny). If both are bfloat16 (kShort), it is the rounded product
// and what that leaves, both bfloat16 and together exact.
enum class Norm { kNone, kAny, kShort };

template <typename X, Norm kNorm>
using SourceOf = XOctet<std::conditional_t<kNorm == Norm::kAny, float, X>>;
template <typename X, Norm kNorm>
using ElementOf = typename SourceOf<X, kNorm>::Element;

// What mmas get of an octet, and sums over it: of x itself, in the lanes where dot lies, and of the squares of x.
template <typename X, Norm kNorm, bool kHasSum>
class Operand {
  using Source = SourceOf<X, kNorm>;
  using Element = typename Source::Element;

 public:
  static constexpr int kParts = kNorm == Norm::kShort ? 2 : Source::kParts;

  __device__ __forceinline__ void make(const XOctet<X>& x, const RawOctet& norm, Dtype norm_dtype,
                                       float (&sum)[4], float (&squares)[4]) {
    if constexpr (kNorm == Norm::kShort) {
      uint32_t xs[1][2][2], norms[1][2][2];
      x.pairs(xs), XOctet<X>{{norm.raw[0]}}.pairs(norms);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int p = 0; p < 2; ++p)
          multiply_pairs(xs[0][h][p], norms[0][h][p], b_[0][h][p], b_[1][h][p]);
        // Rows of x by themselves: squares are on the diagonal.
        mma_m16n8k16<Element>(squares, xs[0][h][0], 0, xs[0][h][1], 0, xs[0][h]);
      }
    } else if constexpr (kLanesAdd) {
      float v[8];
      x.get(v);
      if constexpr (kNorm == Norm::kAny) {
        float factors[8];
        get_octet(norm.raw, norm_dtype, factors);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares[0] = fmaf(v[i], v[i], squares[0]), v[i] *= factors[i];
      }
      Source::pairs_of(v, b_);
      if constexpr (kHasSum)
        sum[0] += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    } else {
      x.pairs(b_);
    }
    if constexpr (kHasSum && !kLanesAdd)
#pragma unroll
      for (int i = 2 * kParts - 1; i >= 0; --i)
        mma_m16n8k16<Element>(sum, kOnes, kOnes, kOnes, kOnes, b_[i / 2][i % 2]);
  }

  // Adds the product of a part with octets of two rows of weights; has: whether this lane's x counts, or is 0.
  __device__ __forceinline__ void multiply(int part, const uint32_t (&a)[2][4], bool has,
                                           float (&to)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t own[2] = {has ? b_[part][h][0] : 0, has ? b_[part][h][1] : 0};
      mma_m16n8k16<Element>(to, a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1], own);
    }
  }

  // At the end of a group: gives each lane the sums of columns 2 t and 2 t + 1.
  static __device__ __forceinline__ void end_sum(float (&sum)[4]) {
    if constexpr (!kHasSum || !kLanesAdd) return;
    const float all = over_row(sum[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = __shfl_sync(~0u, all, threadIdx.x % 4 * 8 + e % 2 * 4);
  }
  // The squares of row g, in lane (g, g / 2).
  static __device__ __forceinline__ float end_squares(const float (&squares)[4]) {
    if constexpr (kNorm == Norm::kAny) return over_row(squares[0]);
    return threadIdx.x / 4 % 2 ? squares[1] : squares[0];
  }

 private:
  static constexpr bool kLanesAdd = kParts > 2;  // instead of a product with ones for each part
  static constexpr uint32_t kOnes = std::is_same_v<Element, __half> ? 0x3c003c00u : 0x3f803f80u;

  uint32_t b_[kParts][2][2];

  // The sum over the four lanes (g, t) of row g.
  static __device__ __forceinline__ float over_row(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  static __device__ __forceinline__ void multiply_pairs(uint32_t x, uint32_t y, uint32_t& product,
                                                        uint32_t& rest) {
    const uint32_t minus = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(x), "r"(y), "r"(minus));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(rest) : "r"(x), "r"(y), "r"(product ^ minus));
  }
};

}  // namespace jaxgemv::cuda::direct
