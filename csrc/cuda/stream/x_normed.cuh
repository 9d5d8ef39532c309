// x with a norm, where it is not bytes, and float32 x beside formats other than integers. x * norm becomes the sum of
// two fp16, by a power of two for each span of a row, and these are two rows of x_pairs.cuh. The second has its own
// power: elements down to 2^-29 of the span's largest are exact to 2^-22, smaller ones off by 2^-51 of it at most.
#pragma once

#include "x_pairs.cuh"

namespace jaxgemv::cuda::stream {

// Up to kMaxRows rows of x * norm, each as two rows of fp16 whose sum it is: columns of two tiles, or
// of the halves of one.
template <typename C, int kMaxRows, int kSpanBytes, int kUnits>
class XNormed : public XPairs<C, __half, __half, 2 * kMaxRows, kSpanBytes, kUnits, false> {
  using Base = XPairs<C, __half, __half, 2 * kMaxRows, kSpanBytes, kUnits, false>;
  static constexpr int kTiles = kMaxRows / 4;  // 1 or 2

 public:
  static constexpr int kRows = kMaxRows, kRowBytes = 2 * Base::kRowBytes;
  static constexpr bool kMayLackNorm = true;
  using Base::kResults, Base::kSpanK;

  // As in XPairs. The two halves of an octet of float32 go to the places of the two rows made of it.
  template <bool kAnyK>
  static __device__ __forceinline__ void ask(const void* x, Dtype dtype, Index first, int rows,
                                             int K, int k0, uint8_t* staged) {
    static_assert(!kAnyK);
    const int size = dtype == Dtype::kF32 ? 4 : 2;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int piece = lane_id() + 32 * j, k = k0 + 8 * piece;
        const char* const from = static_cast<const char*>(x) + (first + m * Index{K} + k) * size;
        copy_or_zeros(staged + Base::place(m, piece), from, k < K);
        if (size == 4) copy_or_zeros(staged + Base::place(rows + m, piece), from + 16, k < K);
      }
    }
  }

  // Returns the sums of squares of rows 2 t and the next of x, for as many t as there are.
  __device__ __forceinline__ float2 take(int rows, Dtype dtype, uint8_t* staged,
                                         const StagedNorm& norm, int count) {
    const int t = lane_id() % 4;
    float factor[2] = {1, 1}, squares[2] = {};
#pragma unroll 1
    for (int m = 0; m < rows; ++m) {
      float of_row = 0;
      const float worth = split(m, rows + m, dtype, staged, norm, count, of_row);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (m == (2 * t + e) % kRows) factor[e] = worth, squares[e] = of_row;
    }
    __syncwarp();
    this->take_rows(staged, Dtype::kF16, [&](int c, int g) {
      return (kTiles == 2 ? c : g / kRows) * rows + min(g % kRows, rows - 1);
    });
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool is_rest = kTiles == 1 && 2 * t + e >= kRows;
      this->power[0][e] *= is_rest ? factor[e] / kOfRest : factor[e];
    }
    return {squares[0], squares[1]};
  }

  __device__ __forceinline__ void add(float2* to, int column_size, int rows, bool more,
                                      const float (&v)[kResults], bool both_rows) const {
    const int t = lane_id() % 4;
    const bool is_mine = t < kRows / 2 && 2 * t < rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r > 0 && !both_rows) break;
      float sum[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float high = v[2 * r + e];
        sum[e] = this->power[0][e] *
                 (kTiles == 2 ? fmaf(1 / kOfRest, v[4 * (kTiles - 1) + 2 * r + e], high) : high);
        if (kTiles == 1) sum[e] += __shfl_xor_sync(both_rows ? ~0u : 15u, sum[e], 2);
      }
      if (!is_mine) continue;
      float2& at = to[t * column_size + 8 * r];
      at = more ? float2{at.x + sum[0], at.y + sum[1]} : float2{sum[0], sum[1]};
    }
  }

  static __device__ __forceinline__ void add_squares(float2* to, int column_size, int rows,
                                                     bool more, float2 squares) {
    const int t = lane_id();
    if (t >= kRows / 2 || 2 * t >= rows) return;
    float2& at = to[t * column_size];
    at = more ? float2{at.x + squares.x, at.y + squares.y} : squares;
  }

 private:
  static constexpr int kPieces = kSpanK / 256;  // octets of a lane
  static constexpr float kOfRest = 0x1p11f;  // what fp16 lacks of a number is 2^-11 of it at most

  // The staged row m becomes x * norm in fp16 by a power of two, and row `rest` what is missing from it, scaled by
  // kOfRest more. Returns the inverse of the power.
  static __device__ __forceinline__ float split(int m, int rest, Dtype dtype, uint8_t* staged,
                                                const StagedNorm& norm, int count, float& squares) {
    float v[kPieces][8];
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int piece = lane_id() + 32 * j;
      const auto raw = [&](int row) {
        return *reinterpret_cast<const uint4*>(staged + Base::place(row, piece));
      };
      const bool has_norm = !norm.is_one && 8 * piece < count;
      float x[8];
      get_octet({raw(m), dtype == Dtype::kF32 ? raw(rest) : uint4{}}, dtype, x);
      if (has_norm) norm.load_octet(v[j], 8 * piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        squares = fmaf(x[i], x[i], squares);
        v[j][i] = has_norm ? v[j][i] * x[i] : x[i];  // zeros past K
        largest = max(largest, __float_as_uint(v[j][i]) & 0x7fffffffu);
      }
    }
    largest = __reduce_max_sync(~0u, largest);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) squares += __shfl_xor_sync(~0u, squares, i);
    const int exponent = normal_exponent<float>(largest, 15);
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = v[j][2 * i] * scale, b = v[j][2 * i + 1] * scale;
        high[i] = half_pair(a, b);
        const float2 back = __half22float2(reinterpret_cast<const __half2&>(high[i]));
        low[i] = half_pair((a - back.x) * kOfRest, (b - back.y) * kOfRest);
      }
      store_shared16(staged + Base::place(m, lane_id() + 32 * j), high);
      store_shared16(staged + Base::place(rest, lane_id() + 32 * j), low);
    }
    return largest < 0x7f800000u ? power_of_two(-exponent) : NAN;
  }
};

}  // namespace jaxgemv::cuda::stream
