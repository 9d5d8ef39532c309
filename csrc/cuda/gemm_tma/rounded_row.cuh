// A row of weights of any format, in float32, each rounded once to what wgmma multiplies.
#pragma once

#include "row_of_scales.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rounds octet `octet` of a stage and stores it in a row of operand A that has `swizzle`.
template <typename X>
__device__ __forceinline__ void store_octet(uint32_t row, int octet, uint32_t swizzle,
                                            const float (&w)[8]) {
  if constexpr (sizeof(X) == 2)
    store_shared16(row + (octet * 16 ^ swizzle),
                   {rounded_pair<X>(w[0], w[1]), rounded_pair<X>(w[2], w[3]),
                    rounded_pair<X>(w[4], w[5]), rounded_pair<X>(w[6], w[7])});
  else
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      store_shared16(row + ((octet * 32 + i * 4) ^ swizzle),
                     {to_tf32(w[i]), to_tf32(w[i + 1]), to_tf32(w[i + 2]), to_tf32(w[i + 3])});
}

// Row n of matrix s. Scales and shifts are asked for a turn before they are used. kMany: as RowOfScales has it.
template <typename S, typename X, bool kMany>
class RoundedRow {
  using C = typename S::C;
  static constexpr int kMost = RowOfScales<S, kMany>::kMost;

 public:
  static constexpr bool kHasAlikeStages = !kMany;  // then one loop body serves all stages of a turn

  __device__ __forceinline__ RoundedRow(const Params& params, int s, int n, const Loads& loads,
                                        const float* table)
      : shift_term_(params.shift),
        table_(table),
        step_(loads.step),
        scales_(params, params.scales[0], s, n, loads.step, loads.by_eights[0]),
        shifts_(params, params.scales[1], s, n, loads.step, loads.by_eights[1]) {}

  // Asks for what the turn that begins with weight k needs.
  __device__ __forceinline__ void ask(int k) {
    scales_.ask(k);
    if constexpr (C::kHasShift) shifts_.ask(k);
  }
  // Begins the turn that has been asked for: w = f * q + c.
  __device__ __forceinline__ void take(int k) {
    scales_.take(k, f_);
    if constexpr (C::kHasShift) shifts_.take(k, c_);
  }
  // Decodes octet `octet` of the turn into its stage, where this thread's row of operand A begins at `row`.
  __device__ __forceinline__ void put(int octet, uint32_t low, uint32_t high, uint32_t row,
                                      uint32_t swizzle) {
    const int slot = kMany ? octet * 8 / S::kSlotK : 0;
    if (kMany ? octet * 8 % S::kSlotK == 0 && (slot & (step_ - 1)) == 0
              : octet % (S::kStageK / 8) == 0) {
      if constexpr (C::kHasShift) shift_ = shift_term_.of(f_[slot], c_[slot]);
#pragma unroll
      for (int p = 0; p < 4; ++p) scale_[p] = f_[slot] * C::worth(p);
    }
    C q;
    q.set(low, high);
    float w[8];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = q.pair(p, table_);
      w[C::code(p, 0)] = fmaf(scale_[p], pair.x, shift_);
      w[C::code(p, 1)] = fmaf(scale_[p], pair.y, shift_);
    }
    store_octet<X>(row, octet % (S::kStageK / 8), swizzle, w);
  }

 private:
  const ShiftTerm& shift_term_;
  const float* const table_;
  const int step_;  // slots from one that may have terms of its own to the next
  RowOfScales<S, kMany> scales_, shifts_;
  float f_[kMost] = {}, c_[kMost] = {};
  float scale_[4], shift_ = 0;
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
