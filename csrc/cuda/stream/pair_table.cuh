// Tables of 16 in shared memory, for one and two rows of x: a byte of codes, two of them, finds both entries by one
// load. (In registers, as table16.cuh has them, a code takes two permutes.)
#pragma once

#include "../common/codes.cuh"
#include "../common/powers.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::stream {

// Entries are numbers of 16 bits, 256 times a signed byte and another one, by a power of two: to 2^-15 of the
// largest, or where that is no power of two 2^-14. The two bytes are neighbours in A, and where they meet x its digits
// of 8 bits, of which it has three, are in columns worth 256 times as much as the one before: a digit that meets the
// higher byte is one column further.
class PairTable : public OneSum {
 public:
  static constexpr int kSteps = 4;  // registers of a word
  static constexpr bool kSigned = true, kHasSums = false;

  // From pair to pair of codes. With 256 bytes, of which lanes have 4 each of the first 128, in banks of their own, a
  // byte of codes is a byte of its address. That is for GPUs that have 200 KB of shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900 && __CUDA_ARCH__ != 1000
  static constexpr int kStride = 128;
#else
  static constexpr int kStride = 256;
#endif
  static constexpr int kBytes = 256 * kStride;
  // What that is at most in code that a GPU of this compute capability runs.
  static constexpr int bytes_on(int major) {
    return major == 9 || major == 10 ? 256 * 256 : 256 * 128;
  }

  // This lane's entry, of a stack's matrix s: to be asked for early.
  static __device__ __forceinline__ uint32_t ask(const Param& table, Index s) {
    return load_bits(table.data, table.dtype, offset_of(table, s, threadIdx.x % 16, 0));
  }

  PairTable() = default;
  // By all warps, which then have to meet.
  __device__ __forceinline__ PairTable(uint32_t entry_bits, Dtype dtype, uint8_t* shared)
      : lane_bytes_(threadIdx.x % 32 * 4), table_(shared) {
    const float entry = float_of_bits(entry_bits, dtype);
    const uint32_t largest = __reduce_max_sync(~0u, __float_as_uint(entry) & 0x7fffffffu);
    int exponent = normal_exponent<float>(largest, 15);
    if (__uint_as_float(largest) * power_of_two(exponent) > 127 * 256 + 127.f) --exponent;
    // Not of one entry alone: codes are not looked at again.
    unit_ = largest < 0x7f800000u ? power_of_two(-exponent) : NAN;
    const int fixed = __float2int_rn(entry * power_of_two(exponent)), high = (fixed + 128) >> 8;
    const uint32_t mine = (high & 0xff) | (fixed & 0xff) << 8;
    for (int second = static_cast<int>(threadIdx.x / 32); second < 16; second += blockDim.x / 32) {
      const uint32_t upper = __shfl_sync(~0u, mine, second) << 16;
#pragma unroll
      for (int first = 0; first < 16; ++first)
        *reinterpret_cast<uint32_t*>(shared + (16 * second + first) * kStride + lane_bytes_) =
            upper | __shfl_sync(~0u, mine, first);
    }
  }

  static __device__ constexpr int code(int four, int i) { return 4 * four + i; }  // for x
  // The entries of byte `step` of a word.
  __device__ __forceinline__ uint32_t quad(uint32_t word, int step) const {
    uint32_t at;
    if constexpr (kStride == 256)
      at = __byte_perm(word, lane_bytes_, 0x5504 | step << 4);
    else
      at = ((step == 0 ? word << 7 : word >> (8 * step - 7)) & 0x7f80) | lane_bytes_;
    return *reinterpret_cast<const uint32_t*>(table_ + at);
  }
  __device__ __forceinline__ float unit() const { return unit_; }

 private:
  float unit_;
  uint32_t lane_bytes_;
  const uint8_t* table_;
};

}  // namespace jaxgemv::cuda::stream
