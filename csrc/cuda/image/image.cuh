// x as operand B of the mma_any and wgmma_any kernels: its image. CTAs with few columns or few quads make it themselves
// in shared memory; for others a kernel before the product makes it in global memory.
//
// A row of x is one column, or two where it is float32 or has a norm: fp16 of 11 bits each, scaled by a power of two
// for every 128 k (a quad of four blocks of 32), which brings the largest to just under 2^15. So elements down to 2^-22
// of the largest of 128 are exact to 2^-22, and smaller ones are off by 2^-40 of it. The record of a quad:
//   4 blocks x 4 registers x columns x 16 bytes: what lanes t = 0 .. 3 have in that register of B
//   columns x 12 float32: the power, up to 8 sums of x, the sum of its squares
// Lane t has octets t, t + 4 .. of the quad or, if runs_of() is true, octets 4 t, 4 t + 1 ..
#pragma once

#include "../common/formats.cuh"
#include "../common/norm.cuh"
#include "../common/powers.cuh"
#include "../common/ptx.cuh"
#include "image.h"

namespace jaxgemv::cuda::image {

constexpr int kPower = 0, kSums = 1, kSquares = 9;  // in a column's 12 float32 of a record

// Whether lanes take runs of octets: only where a quad has one scale.
template <typename C>
__device__ __forceinline__ bool runs_of(int slots) {
  return C::kRuns && slots == 1;
}

// How x is read: rows of K elements, of any dtype and alignment.
struct XSource {
  const void* data;
  Dtype dtype;
  int K;
  bool aligned;  // every row, to 16 bytes
  Param norm;

  // Whether a table's entries may be off by 2^-14 of the largest.
  __device__ __forceinline__ bool lets_round() const { return dtype != Dtype::kF32; }
};

// Eight elements of a row from k on; zeros past the end.
__device__ __forceinline__ void load_octet_of_x(const XSource& x, Index row, int k, float (&v)[8]) {
  const Index at = row * x.K + k;
  const bool whole = x.aligned && k + 8 <= x.K;
  if (x.dtype == Dtype::kF32) {
    const float* const from = static_cast<const float*>(x.data) + at;
    if (whole) {
      const uint4 a = load16(from), b = load16(from + 4);
      const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(bits[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = k + i < x.K ? __ldg(from + i) : 0.f;
    }
    return;
  }
  const unsigned short* const from = static_cast<const unsigned short*>(x.data) + at;
  uint32_t bits[8];
  if (whole) {
    const uint4 raw = load16(from);
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffffu;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = k + i < x.K ? __ldg(from + i) : 0;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = float_of_bits(bits[i], x.dtype);
}

// Stores eight elements times 2^exponent as lane t's part of a record's block, in columns column .. column + parts - 1.
template <typename C>
__device__ __forceinline__ void store_octet(float (&v)[8], int exponent, uint8_t* record, int block,
                                            int t, int column, int columns, int parts) {
  const float scale = power_of_two(exponent);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part == parts) break;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float &first = v[C::code(p, 0)], &second = v[C::code(p, 1)];
      const __half2 pair = __floats2half2_rn(first * scale, second * scale);
      uint32_t* const granule =
          reinterpret_cast<uint32_t*>(record + ((block * 4 + p) * columns + column + part) * 16);
      granule[t] = reinterpret_cast<const uint32_t&>(pair);
      if (part + 1 == parts) continue;
      // The rest that the first part misses, for the second.
      const float back = power_of_two(-exponent);
      first -= __low2float(pair) * back, second -= __high2float(pair) * back;
    }
  }
}

// Called by both halves of a warp: 16 lanes make the record of one quad of a row of x. x: this lane's eight elements,
// which begin at k. column: the row's first of the image's `columns`; parts: 1, or 2 columns. slots: sums of x in a
// quad. C: an Octet, or a Decoder.
template <typename C>
__device__ __forceinline__ void put_quad(const float (&x)[8], uint8_t* record, int column,
                                         int columns, int parts, int slots, const NormValues& norm,
                                         int k, int K) {
  const int lane = threadIdx.x % 16;
  float v[8], sum = 0, squares = 0;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = x[i];
  if (norm.data != nullptr)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (k + i < K)
        squares = fmaf(x[i], x[i], squares), v[i] *= load(norm.data, norm.dtype, k + i);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sum += v[i], largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
  for (int i = 1; i < 16; i *= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, i));
    squares += __shfl_xor_sync(~0u, squares, i);
    if (i * 8 < kQuadK / slots) sum += __shfl_xor_sync(~0u, sum, i);
  }
  const int exponent = normal_exponent<float>(largest, 15);
  const bool runs = runs_of<C>(slots);
  const int block = runs ? lane % 4 : lane / 4, t = runs ? lane / 4 : lane % 4;
  store_octet<C>(v, exponent, record, block, t, column, columns, parts);
  const int lanes = 16 / slots;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part == parts) break;
    float* const meta =
        reinterpret_cast<float*>(record + columns * kQuadK * 2) + (column + part) * kMetaWords;
    if (lane == 0) {
      meta[kPower] = largest < 0x7f800000u ? power_of_two(-exponent) : NAN;
      meta[kSquares] = squares;
    }
    if (lane % lanes == 0) meta[kSums + lane / lanes] = part == 0 ? sum / C::kWorth : 0.f;
  }
}

}  // namespace jaxgemv::cuda::image
