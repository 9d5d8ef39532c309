// Scales, or shifts, of a row of weights, for one turn of decoding after another.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A load takes the cache 32 cycles, since each lane's row is another line, and shared memory waits for it: so where
// possible, the 8 bytes with all scales of a turn are loaded at once. kMany: a turn may have several groups.
template <typename S, bool kMany>
class RowOfScales {
 public:
  static constexpr int kMost = kMany ? S::kTurnK / S::kSlotK : 1;  // slots of a turn
  static constexpr int kSecond = kMany ? 1 : 0;  // index of the second of two words, if any

  __device__ __forceinline__ RowOfScales(const Params& params, const ScaleSource& source, int s,
                                         int n, int step, bool by_eights)
      : groups_(params.groups),
        row_(source.row(s, n)),
        g_bytes_(source.g_bytes),
        dtype_(source.dtype),
        step_(step),
        by_eights_(kMany && by_eights) {}

  // Asks for what the turn that begins with weight k needs.
  __device__ __forceinline__ void ask(int k) {
    if (by_eights_) {
      const uint2 eight = __ldg(reinterpret_cast<const uint2*>(row_ + (place_of(k) & ~7)));
      bits_[0] = eight.x, bits_[kSecond] = eight.y;
      return;
    }
    with_type([&](auto number) {
      each([&](int i, int) {
        const char* const at = row_ + place_of(k + i * S::kSlotK);
        bits_[i] = __ldg(reinterpret_cast<const decltype(number)*>(at));
      });
    });
  }
  // Takes the turn that has been asked for and begins with weight k: to[i] for each slot i that begins a group.
  __device__ __forceinline__ void take(int k, float (&to)[kMost]) const {
    if (!by_eights_)
      return with_type(
          [&](auto number) { each([&](int i, int) { to[i] = as_float(number, bits_[i]); }); });
    const int place = place_of(k);
    const uint32_t second = bits_[kSecond];
    const uint32_t first = (place & 4 ? second : bits_[0]) >> (place & 3) * 8;
    with_type([&](auto number) {
      constexpr int kBits = 8 * sizeof(number), kInWord = 32 / kBits;
      each([&](int i, int j) {
        if (j < 2 * kInWord)
          to[i] = as_float(number, (j < kInWord ? first : second) >> j % kInWord * kBits);
      });
    });
  }

 private:
  const Groups& groups_;
  const char* const row_;
  const int g_bytes_;
  const Dtype dtype_;
  const int step_;  // slots from one that begins a group to the next
  const bool by_eights_;
  uint32_t bits_[kMost] = {};  // of slots, or the two words of eight bytes

  __device__ __forceinline__ int place_of(int k) const { return groups_.of(k) * g_bytes_; }
  // One type for all slots: a branch for each would keep their loads apart.
  template <typename Use>
  __device__ __forceinline__ void with_type(Use&& use) const {
    if (!is_wide(dtype_))
      use(uint8_t{});
    else if (dtype_ == Dtype::kF32)
      use(uint32_t{});
    else
      use(uint16_t{});
  }
  template <typename Number>
  __device__ __forceinline__ float as_float(Number, uint32_t bits) const {
    bits = static_cast<Number>(bits);
    if constexpr (sizeof(Number) == 1) return float_of_byte(bits, dtype_);
    if constexpr (sizeof(Number) == 4) return __uint_as_float(bits);
    return float_of_bits(bits, dtype_);
  }
  // Calls use(i, j) for each slot i that begins a group, the j-th of these.
  template <typename Use>
  __device__ __forceinline__ void each(Use&& use) const {
    if (!kMany) return use(0, 0);
    if (S::kMostSlots == 8 && step_ == 4) return each_of<4>(use);
    step_ == 2 ? each_of<2>(use) : each_of<1>(use);
  }
  template <int kStep, typename Use>
  static __device__ __forceinline__ void each_of(Use&& use) {
#pragma unroll
    for (int i = 0; i < kMost; i += kStep) use(i, i / kStep);
  }
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
