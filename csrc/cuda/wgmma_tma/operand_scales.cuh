// Scales of one byte that are part of operand A of the wgmma_tma kernel: an entry of E2M1 times a scale is exact as
// fp16, so that all products of a quad add up. Products that are not exact, each warp adds alone: left_over.cuh.
#pragma once

#include "image.cuh"
#include "scales.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// For one scale per row, with which there is nothing to do before the end.
struct NoScales {
  __device__ __forceinline__ void step(int, bool) const {}
};

// The scales of a lane's two rows, for its run of 32 codes in each quad: two of e4m3, or one of e8m0. Those of a box
// are loaded a box ahead. e8m0 scales are powers of two relative to the largest that the warp has in their row, and
// zero where they are too small beside it to be exact.
template <typename S>
class OperandScales {
 public:
  static constexpr bool kPowers = S::kInOperand == InOperand::kE8M0;
  static constexpr int kRunBytes = kPowers ? 1 : 2;

  // For tile `tile` of 16 rows; `unit`: the warp's first box.
  __device__ __forceinline__ OperandScales(const Params& params, const Share& own, int tile,
                                           int unit)
      : params_(params), entry_(entry_bits(params.codebook, max(own.s, 0))) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rows_[h] = params.scales[0].row(own.s, params.row_of(tile, row_of_lane<S>() + 8 * h));
    ask(unit);
    if constexpr (kPowers) {
      const int end = min(own.last_unit * kUnitRuns, params.x.K / 32);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        top_[h] = min(largest_byte(rows_[h], unit * kUnitRuns, end, params.log_deep() + 3,
                                   params.x.K % 128 == 0),
                      kNan - 1);
    }
  }

  // Moves on to the box that was asked for; asks for the one behind it.
  __device__ __forceinline__ void step(int unit, bool) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int q = 0; q < S::kQuads; ++q) now_[h][q] = numbers_of(h, asked_[h][q]);
    ask(unit + params_.deep);
  }
  __device__ __forceinline__ void reach(int, int) const {}
  __device__ __forceinline__ Terms terms(int, int) const { return {{1, 1}, {}}; }

  // The scale, in both halves, of octet j of the lane's run in quad q, row h.
  __device__ __forceinline__ __half2 of(int h, int q, int j) const {
    const __half2 both = q == 0 ? now_[h][0] : now_[h][S::kQuads - 1];
    return kPowers ? both : j < 2 ? __low2half2(both) : __high2half2(both);
  }

  // This lane's entry of the table.
  __device__ __forceinline__ float entry() const {
    return float_of_bits(entry_, params_.codebook.dtype);
  }
  // When all products are added: the factor of the sums of row h, if the table is E2M1 times `factor`.
  __device__ __forceinline__ float worth(int h, float factor) const {
    const float worth = factor * E2M1Decoder::kWorth;
    if (!kPowers) return worth;
    return worth / (1 << E2M1Decoder::kTop) * __uint_as_float(bits_of_e8m0(top_[h]));
  }
  // Whether a scale was too small, or NaN.
  __device__ __forceinline__ bool has_left() const { return __any_sync(~0u, has_left_); }

  // The scale itself, for one half of a run of row h. left_only: 0 unless it was left out.
  __device__ __forceinline__ float scale_of(int h, int run, int half, bool left_only) const {
    const uint32_t bytes = bytes_at(rows_[h] + run * kRunBytes);
    if constexpr (kPowers) {
      return left_only && !is_left(top_[h] - bytes) ? 0 : __uint_as_float(bits_of_e8m0(bytes));
    }
    const float2 both = __half22float2(numbers_of_e4m3(bytes));
    return left_only ? 0 : half == 0 ? both.x : both.y;
  }

 private:
  static constexpr uint32_t kNan = 255;
  static constexpr int kUnitRuns = S::kUnitK / 32;
  const Params& params_;
  const uint32_t entry_;
  const char* rows_[2];
  uint32_t top_[2];
  uint32_t asked_[2][S::kQuads] = {};
  __half2 now_[2][S::kQuads];
  bool has_left_ = false;

  static __device__ __forceinline__ uint32_t bytes_at(const char* at) {
    if (kPowers) return __ldg(reinterpret_cast<const uint8_t*>(at));
    return __ldg(reinterpret_cast<const uint16_t*>(at));
  }
  // The largest scale of the eight runs in each of a warp's boxes, from `begin` on and 2^log_step apart, by the four
  // lanes of a row together. The loops count, or they would not be unrolled: a step that is not known may be 0.
  static __device__ __forceinline__ uint32_t largest_byte(const char* row, int begin, int end,
                                                          int log_step, bool is_words) {
    static_assert(kUnitRuns == 8);
    const int t = threadIdx.x % 4;
    const auto count = [&](int from, int log) { return (end - from + (1 << log) - 1) >> log; };
    uint32_t most = 0;
    if (is_words) {
      const int from = begin + (t / 2 << log_step) + t % 2 * 4;
#pragma unroll 8
      for (int i = 0; i < count(from, log_step + 1); ++i)
        most = __vmaxu4(
            most, __ldg(reinterpret_cast<const uint32_t*>(row + from + (i << (log_step + 1)))));
      most = max(max(most >> 24, most >> 16 & 0xff), max(most >> 8 & 0xff, most & 0xff));
    } else {
#pragma unroll 4
      for (int i = 0; i < count(begin + t, log_step); ++i) {
        const int at = begin + t + (i << log_step);
        most = max(most, max(bytes_at(row + at), bytes_at(row + min(at + 4, end - 1))));
      }
    }
#pragma unroll
    for (int i = 1; i < 4; i *= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
    return most;
  }
  // Codes behind K meet zeros of x: any scale will do that is not left out, so the row's last one.
  __device__ __forceinline__ void ask(int unit) {
#pragma unroll
    for (int q = 0; q < S::kQuads; ++q) {
      const int t = threadIdx.x % 4, run = min(unit * kUnitRuns + q * 4 + t, params_.x.K / 32 - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) asked_[h][q] = bytes_at(rows_[h] + run * kRunBytes);
    }
  }
  static __device__ __forceinline__ __half2 numbers_of_e4m3(uint32_t bytes) {
    return half2_of(pair_of_float8<Format::kE4M3>(bytes));
  }
  // Whether a scale is so far below the largest that it is left out. NaN (255) is above all: `below` wraps around.
  static __device__ __forceinline__ bool is_left(uint32_t below) {
    return below >= E2M1Decoder::kSpread;
  }
  __device__ __forceinline__ __half2 numbers_of(int h, uint32_t bytes) {
    if constexpr (!kPowers) return numbers_of_e4m3(bytes);
    // Relative to the largest, which becomes 2^kTop.
    constexpr uint32_t kExponents = 0x04000400, kLargest = E2M1Decoder::kTop + 15;
    const uint32_t below = top_[h] - bytes;
    has_left_ |= is_left(below);
    return half2_of(is_left(below) ? 0 : (kLargest - below) * kExponents);
  }
};

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
