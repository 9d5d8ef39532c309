// A row of weights of any format, in float32, each rounded once to what wgmma multiplies.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Octet `octet` of a stage, rounded, into a row of operand A that has `swizzle`.
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

// Row n of matrix s. Scales and shifts are asked for a turn before they are used.
template <typename S, typename X>
class RoundedRow {
  using C = typename S::C;

 public:
  __device__ __forceinline__ RoundedRow(const Params& params, int s, int n, const float* table)
      : params_(params),
        scale_row_(params.scales[0].row(s, n)),
        shift_row_(C::kHasShift ? params.scales[1].row(s, n) : nullptr),
        table_(table) {}

  // Asks for what the turn that begins with weight k needs.
  __device__ __forceinline__ void ask(int k) {
    each([&](int i) {
      const int group = params_.groups.of(k + i * S::kSlotK);
      scale_bits_[i] = bits_at(scale_row_, group, params_.scales[0]);
      if constexpr (C::kHasShift) shift_bits_[i] = bits_at(shift_row_, group, params_.scales[1]);
    });
  }
  // Begins the turn that has been asked for: w = f * q + c.
  __device__ __forceinline__ void take() {
    each([&](int i) {
      f_[i] = number(scale_bits_[i], params_.scales[0].dtype);
      if constexpr (C::kHasShift)
        c_[i] = params_.shift.of(f_[i], number(shift_bits_[i], params_.scales[1].dtype));
    });
  }
  // Octet `octet` of the turn, in its place of its stage, whose row of operand A begins at `row`.
  __device__ __forceinline__ void put(int octet, uint32_t low, uint32_t high, uint32_t row,
                                      uint32_t swizzle) {
    const int slot = octet * 8 / S::kSlotK;
    if (octet * 8 % S::kSlotK == 0 && begins(slot)) {
      shift_ = c_[slot];
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
  static constexpr int kMost = S::kTurnK / S::kSlotK;
  const Params& params_;
  const char *const scale_row_, *const shift_row_;
  const float* const table_;
  uint32_t scale_bits_[kMost] = {}, shift_bits_[kMost] = {};
  float f_[kMost] = {}, c_[kMost] = {};
  float scale_[4], shift_ = 0;

  // Whether slot i of a turn may have terms of its own.
  __device__ __forceinline__ bool begins(int i) const {
    const int slots = params_.groups.slots;
    return i == 0 || (slots > 1 && (S::kMostSlots == 4 || i % 2 == 0 || slots > 4));
  }
  // use(i), for all of these.
  template <typename Use>
  __device__ __forceinline__ void each(Use&& use) {
    use(0);
    if (params_.groups.slots == 1) return;
#pragma unroll
    for (int i = 1; i < kMost; ++i)
      if (begins(i)) use(i);
  }
  static __device__ __forceinline__ uint32_t bits_at(const char* row, int group,
                                                     const ScaleSource& source) {
    const char* const at = row + group * source.g_bytes;
    if (is_wide(source.dtype)) return load_bits(at, source.dtype, 0);
    return __ldg(reinterpret_cast<const uint8_t*>(at));
  }
  static __device__ __forceinline__ float number(uint32_t bits, Dtype dtype) {
    return is_wide(dtype) ? float_of_bits(bits, dtype) : float_of_byte(bits, dtype);
  }
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
