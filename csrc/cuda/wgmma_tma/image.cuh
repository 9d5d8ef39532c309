// The kernel in front of wgmma_tma: makes the image of x, operand B, scaled by a power of two for each row.
#pragma once

#include "image.h"
#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// What is known of a row of x as a whole.
struct alignas(16) RowOfX {
  float power;    // what its sums are to be multiplied with
  float squares;  // the sum of squares of x, for a norm
  float sum;      // of its elements, as in a record
};

// The image of a CTA's rows of x, tile `tile` of a slice: records, and behind them a RowOfX for each column.
struct Image {
  uint8_t* at;
  int quads, record_bytes;

  __device__ __forceinline__ Image(const Params& params, uint8_t* image, int slice, int tile,
                                   int quads, int columns, int record_bytes)
      : at(image +
           (Index{slice} * params.m_tiles + tile) * (quads * Index{columns * kRecordBytes})),
        quads(quads),
        record_bytes(record_bytes) {}
  __device__ __forceinline__ uint8_t* record(int quad) const {
    return at + quad * Index{record_bytes};
  }
  __device__ __forceinline__ RowOfX* rows() const {
    return reinterpret_cast<RowOfX*>(record(quads));
  }
};

// The decoder whose order of codes the image follows: one for all with S::kHasPairs, and one for all others.
template <bool kHasPairs>
using OrderOf =
    std::conditional_t<kHasPairs, Decoder<Format::kAffine, 4>, Decoder<Format::kCodebook, 4>>;

// A warp for each quarter of an SM, with the registers that the next kernel leaves there, 32 a thread: so its CTAs
// find room beside these. Long rows, and x * norm, are more work, and have a thread for each octet of 4096 k instead.
constexpr int kFewThreads = 128, kManyThreads = 512;
constexpr int kAtOnce = 4;  // octets of 16-bit x that a thread asks for

// The largest magnitude of an octet that is not yet converted, as the bits of a float32.
template <typename X>
__device__ __forceinline__ uint32_t largest_of(const RawOctet& octet) {
  const uint4 &a = octet.raw[0], &b = octet.raw[1];
  if constexpr (sizeof(X) == 4) {
    uint32_t most = 0;
    for (const uint32_t bits : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w})
      most = max(most, bits & 0x7fffffffu);
    return most;
  } else {
    uint32_t most = 0;
    for (const uint32_t bits : {a.x, a.y, a.z, a.w}) most = __vmaxu2(most, bits & 0x7fff7fffu);
    return __float_as_uint(float_of_bits(max(most >> 16, most & 0xffffu), kDtypeOf<X>));
  }
}

// CTA (part, m, slice) looks at all of row m of x and makes a part of its quads; where a row is long, its CTAs are a
// cluster (`shares`), and each looks at its own part. A number that is 2^-29 of its row's largest or more keeps 11
// bits, or 22 in two columns; a smaller one is off by 2^-40 of the largest at most.
// C: a decoder, as OrderOf has it. X: the type of x, looked up at run time with kNorm. kSplit: whether sums are two
// numbers.
template <typename C, typename X, int kThreads, bool kNorm, bool kSplit>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 16 : 2)
    make_image(const Params params, uint8_t* image, const Records records) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_earlier();
  let_next_begin();
  constexpr int kWarps = kThreads / 32;
  const Dtype dtype = kNorm ? params.x.dtype : kDtypeOf<X>;
  __shared__ uint32_t largest_in[kWarps];
  __shared__ float squares_in[kWarps], sum_in[kWarps], of_part[3];
  const int part = static_cast<int>(blockIdx.x), m = blockIdx.y, slice = blockIdx.z,
            tile = m / params.rows_m, column = (m - tile * params.rows_m) * params.parts;
  // The same as kNorm; but where the compiler knows that it is false, ptxas hoists more and spills registers.
  const bool has_norm = params.x.norm.data != nullptr;
  const int s = has_norm ? max(stack_entry(params.index, params.stack, slice), 0) : 0;
  const NormValues norm(params.x.norm, s, 0);
  const Index before = (Index{slice} * params.M + m) * params.x.K;
  const void* const row = kNorm ? static_cast<const void*>(static_cast<const char*>(params.x.data) +
                                                           before * size_of(dtype))
                                : static_cast<const X*>(params.x.data) + before;
  const auto ask = [&](int octet) {
    RawOctet raw;
    raw.ask(row, dtype, octet * 8, octet * 8 < params.x.K);
    return raw;
  };
  // v = x * norm; returns the sum of the squares of x. Half by half, to save registers.
  const auto get = [&](int octet, const RawOctet& raw, float (&v)[8]) {
    float squares = 0;
    get_octet(raw.raw, dtype, v);
    if (!has_norm) return squares;
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      uint32_t bits[4] = {};
      const int k = octet * 8 + first;
      if (k < params.x.K && norm.dtype == Dtype::kF32) {
        const uint4 four = load16(norm.data + k * 4);
        bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
      } else if (k < params.x.K) {
        const uint2 four = load8(norm.data + k * 2);
        bits[0] = four.x, bits[1] = four.x >> 16, bits[2] = four.y, bits[3] = four.y >> 16;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& of = v[first + i];
        squares = fmaf(of, of, squares), of *= float_of_bits(bits[i], norm.dtype);
      }
    }
    return squares;
  };

  const int octets = records.quads * 16, thread = static_cast<int>(threadIdx.x);
  const int begin = records.shares ? part * records.each * 16 : 0,
            end = records.shares ? begin + records.each * 16 : octets;  // octets past K are zeros
  uint32_t largest = 0;
  float squares = 0, total = 0;
  if (has_norm) {
#pragma unroll 1
    for (int octet = begin + thread; octet < end; octet += kThreads) {
      float v[8];
      squares += get(octet, ask(octet), v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
        if (C::kHasShift && records.totals) total += v[i];
      }
    }
  } else {
#pragma unroll(sizeof(X) == 4 ? 1 : kAtOnce)
    for (int octet = begin + thread; octet < end; octet += kThreads) {
      const RawOctet raw = ask(octet);
      largest = max(largest, largest_of<X>(raw));
      if (!C::kHasShift || sizeof(X) == 4 || !records.totals) continue;
      float v[8];
      get_octet(raw.raw, dtype, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) total += v[i];
    }
  }
  const int warp = thread / 32;
  largest = __reduce_max_sync(~0u, largest);
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    squares += __shfl_xor_sync(~0u, squares, i), total += __shfl_xor_sync(~0u, total, i);
  if (thread % 32 == 0)
    largest_in[warp] = largest, squares_in[warp] = squares, sum_in[warp] = total;
  __syncthreads();
  largest = 0, squares = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    largest = max(largest, largest_in[w]), squares += squares_in[w], total += sum_in[w];
  if (records.shares) {
    if (thread == 0)
      of_part[0] = __uint_as_float(largest), of_part[1] = squares, of_part[2] = total;
    sync_cluster();
    largest = 0, squares = 0, total = 0;
#pragma unroll 1
    for (int r = 0; r < static_cast<int>(gridDim.x); ++r) {
      largest = max(largest, __float_as_uint(load_of_rank(of_part, r)));
      squares += load_of_rank(of_part + 1, r), total += load_of_rank(of_part + 2, r);
    }
  }

  const int exponent = normal_exponent<float>(largest, 15);
  const auto of_sum = [&] { return power_of_two(exponent) / C::kWorth; };
  const Image to(params, image, slice, tile, records.quads, records.columns, records.bytes);
  if (part == 0 && thread < params.parts)
    to.rows()[column + thread] = {largest < 0x7f800000u ? power_of_two(-exponent) : NAN, squares,
                                  thread == 0 ? total * of_sum() : 0.f};
  const int first = part * records.each * 16, last = min(first + records.each * 16, octets);
  constexpr bool kAsksEarly = sizeof(X) == 2;  // for the next octet, where there are registers
  RawOctet raw;
  if (kAsksEarly) raw = ask(first + thread);
  // All lanes of a warp stay together.
#pragma unroll 1
  for (int next = first; next < last; next += kThreads) {
    const int octet = next + thread, i = octet % 16;
    float v[8], sum = 0;
    if (!kAsksEarly) raw = ask(octet);
    get(octet, raw, v);
    if (kAsksEarly && next + kThreads < last) raw = ask(octet + kThreads);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += v[e];
#pragma unroll
    for (int e = 1; e < 16; e *= 2)
      if (e < 1 << records.log_lanes) sum += __shfl_xor_sync(~0u, sum, e);
    if (octet >= last) continue;
    uint8_t* const record = to.record(octet / 16);
    const int lane = i & ((1 << records.log_lanes) - 1), group = i >> records.log_lanes;
    if (C::kHasShift && records.sums && lane < params.parts) {
      const float sum_of_x = lane == 0 ? sum * of_sum() : 0.f;
      uint8_t* const sums = record + sums_at(records.columns, group, kSplit);
      if (kSplit) {
        const TwoTf32 both(sum_of_x);
        uint2* const at = reinterpret_cast<uint2*>(sums) + (column + lane) * 2 + group % 2;
        *at = {both.high, both.low};
        if (records.log_lanes == 4) at[1] = {both.high, both.low};
      } else {
        reinterpret_cast<float*>(sums)[column + lane] = sum_of_x;
      }
    }
    store_octet<C>(v, exponent, record, records.runs ? i % 4 : i / 4, records.runs ? i / 4 : i % 4,
                   column, records.columns, params.parts);
  }
  if (records.shares) leave_cluster();
#endif
}

}  // namespace jaxgemv::cuda::wgmma_tma
