// The kernel in front of wgmma_tma: x as operand B, by a power of two for each row.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// What is known of a row of x as a whole.
struct alignas(16) RowOfX {
  float power;    // what its sums are to be multiplied with
  float squares;  // their sum, for a norm
  float sum;      // of its elements, as in a record
};

// Of a CTA's rows of x, the `tile`th of a slice: records, and behind them a RowOfX for each column.
struct Image {
  uint8_t* at;
  int quads, record_bytes;

  __device__ __forceinline__ Image(const Params& params, uint8_t* image, int tile, int quads,
                                   int columns, int record_bytes)
      : at(image +
           (Index{blockIdx.y} * params.m_tiles + tile) * (quads * Index{columns * kRecordBytes})),
        quads(quads),
        record_bytes(record_bytes) {}
  __device__ __forceinline__ uint8_t* record(int quad) const {
    return at + quad * Index{record_bytes};
  }
  __device__ __forceinline__ RowOfX* rows() const {
    return reinterpret_cast<RowOfX*>(record(quads));
  }
};

constexpr int kMostImageThreads = 1024;

// A CTA a row of x, a thread a few octets. A number that is 2^-29 of its row's largest or more keeps 11 bits, or
// 22 in two columns; a smaller one is off by 2^-40 of the largest at most. 2^log_lanes of the 16 lanes of a quad
// have a group, with a sum of its own.
template <typename C, int kColumns>
__global__ void __launch_bounds__(kMostImageThreads)
    make_image(const Params params, uint8_t* image, int quads, int log_lanes, bool runs) {
  let_second_begin();
  __shared__ uint32_t largest_of[kMostImageThreads / 32];
  __shared__ float squares_of[kMostImageThreads / 32], sum_of[kMostImageThreads / 32];
  const int m = blockIdx.x, tile = m / params.rows_m,
            column = (m - tile * params.rows_m) * params.parts;
  const int s = max(stack_entry(params.index, params.stack, blockIdx.y), 0), lanes = 1 << log_lanes;
  const NormValues norm(params.x.norm, s, 0);
  float v[8], squares = 0, total = 0;
  const auto load_octet = [&](int octet) {
    const bool inside = octet * 8 < params.x.K;
    RawOctet x, factors;  // both are on their way before one is looked at
    x.ask(params.x.data, params.x.dtype,
          (Index{blockIdx.y} * params.M + m) * params.x.K + octet * 8, inside);
    if (norm.data != nullptr) factors.ask(norm.data, norm.dtype, octet * 8, inside);
    get_octet(x.raw, params.x.dtype, v);
    if (norm.data == nullptr) return;
    float by[8];
    get_octet(factors.raw, norm.dtype, by);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares), v[i] *= by[i];
  };

  // All lanes of a warp stay together. The first octet comes last, and is kept.
  const int octets = quads * 16, threads = blockDim.x;
  uint32_t largest = 0;
  for (int first = (octets - 1) / threads * threads; first >= 0; first -= threads) {
    load_octet(first + static_cast<int>(threadIdx.x));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      total += v[i], largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
  }
  const auto reduce = [&] {
    largest = __reduce_max_sync(~0u, largest);
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
      squares += __shfl_xor_sync(~0u, squares, i), total += __shfl_xor_sync(~0u, total, i);
  };
  reduce();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) largest_of[warp] = largest, squares_of[warp] = squares, sum_of[warp] = total;
  __syncthreads();
  const bool has = lane < threads / 32;
  largest = has ? largest_of[lane] : 0, squares = has ? squares_of[lane] : 0;
  total = has ? sum_of[lane] : 0;
  reduce();

  const int exponent = normal_exponent<float>(largest, 15);
  const float of_sum = power_of_two(exponent) / C::kWorth;
  const Image to(params, image, tile, quads, kColumns,
                 record_bytes(kColumns, C::kHasShift ? 16 >> log_lanes : 0));
  if (static_cast<int>(threadIdx.x) < params.parts)
    to.rows()[column + threadIdx.x] = {largest < 0x7f800000u ? power_of_two(-exponent) : NAN,
                                       squares, threadIdx.x == 0 ? total * of_sum : 0.f};
  for (int first = 0; first < octets; first += threads) {
    const int octet = first + static_cast<int>(threadIdx.x), i = octet % 16;
    if (first > 0) load_octet(octet);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += v[e];
#pragma unroll
    for (int e = 1; e < 16; e *= 2)
      if (e < lanes) sum += __shfl_xor_sync(~0u, sum, e);
    if (octet >= octets) continue;
    uint8_t* const record = to.record(octet / 16);
    store_octet<C>(v, exponent, record, runs ? i % 4 : i / 4, runs ? i / 4 : i % 4, column,
                   kColumns, params.parts);
    const int part = i & lanes - 1;
    if (C::kHasShift && part < params.parts)
      reinterpret_cast<float*>(record + sums_at(kColumns, i >> log_lanes))[column + part] =
          part == 0 ? sum * of_sum : 0.f;
  }
}

}  // namespace jaxgemv::cuda::wgmma_tma
