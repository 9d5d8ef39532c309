// Octets of weights as float32, before their scale: exact, so that a weight is rounded once.
#pragma once

#include "../common/formats.cuh"
#include "../image/weights.cuh"

namespace jaxgemv::cuda::gemm {

// As Decoder has it (formats.cuh), but
//   kEntries       floats of the table in shared memory
//   set(..)        takes an octet
//   pair(p, ..)    its codes code(p, 0) and code(p, 1), times 1 / worth(p)
template <Format kFormat, int kBits>
class Numbers;

// An octet's two words, which are fewer registers than four pairs.
class OctetWords {
 public:
  static constexpr int kEntries = 0;
  __device__ __forceinline__ void set(uint32_t low, uint32_t high) { low_ = low, high_ = high; }

 protected:
  uint32_t low_, high_;
};

template <int kBits>
class Numbers<Format::kAffine, kBits> : public Decoder<Format::kAffine, kBits>, public OctetWords {
  using Base = Decoder<Format::kAffine, kBits>;

 public:
  static __device__ constexpr float worth(int p) {
    return 0x1p24f / static_cast<float>(1 << Base::window(p).place);
  }
  __device__ __forceinline__ Numbers() : Base(nullptr) {}
  __device__ __forceinline__ float2 pair(int p, const float*) const {
    uint32_t pairs[4];
    Base::masked(low_, high_, pairs);
    return __half22float2(reinterpret_cast<const __half2&>(pairs[p]));
  }
};

template <Format kFormat>
  requires(is_float8(kFormat))
class Numbers<kFormat, 8> : public Decoder<kFormat, 8>, public OctetWords {
 public:
  static __device__ constexpr float worth(int) { return 1; }
  __device__ __forceinline__ Numbers() : Decoder<kFormat, 8>(nullptr) {}
  __device__ __forceinline__ float2 pair(int p, const float*) const {
    const uint32_t both = pair_of_float8<kFormat>((p < 2 ? low_ : high_) >> (p % 2 * 16));
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
};

// A table of 16: each lane has its entries in a bank of its own.
template <>
class Numbers<Format::kCodebook, 4> : public Octet<4> {
 public:
  static constexpr int kEntries = 16 * 32;
  static constexpr bool kHasShift = false;
  static __device__ constexpr float worth(int) { return 1; }
  static __device__ constexpr int code(int p, int e) { return 2 * p + e; }

  // Called by all threads of a CTA, which then have to synchronize.
  static __device__ __forceinline__ void make_table(const Param& from, Index s, float* to) {
    for (int i = threadIdx.x; i < kEntries; i += blockDim.x) to[i] = cuda::load(from, s, i / 32, 0);
  }

  __device__ __forceinline__ void set(uint32_t low, uint32_t) { codes_ = low; }
  __device__ __forceinline__ float2 pair(int p, const float* table) const {
    const auto entry = [&](int i) {
      const uint32_t at = i < 2 ? codes_ << (7 - 4 * i) : codes_ >> (4 * i - 7);  // times 128 bytes
      return *reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(table) +
                                             ((at & 0x780) | threadIdx.x % 32 * 4));
    };
    return {entry(code(p, 0)), entry(code(p, 1))};
  }

 private:
  uint32_t codes_;
};

}  // namespace jaxgemv::cuda::gemm
