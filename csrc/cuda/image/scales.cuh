// Scale and shift of the 16 rows of a tile, for the kernels with an image of x: each lane copies and converts one of
// the two for one row, of any dtype and number of groups. They are copied by the window: the pieces of 16 bytes in
// which the groups of some units of K lie.
#pragma once

#include <cmath>

#include "../common/ptx.cuh"
#include "image.cuh"

namespace jaxgemv::cuda::image {

// How groups of codes and the slots of a quad go together: a quad of 128 codes has 1, 4 or 8 slots,
// none of which crosses into another group.
struct Groups {
  int slots;
  uint32_t magic;  // 2^31 over the sixteens of a group, rounded up
  int last;        // index of the last group

  __device__ __forceinline__ int of(int k) const {
    return min(static_cast<int>(__umulhi(static_cast<uint32_t>(k) / 8 & ~1u, magic)), last);
  }
};

// y += f * dot(q, x) + c * sum(x), for rows g and g + 8 of a lane.
struct Terms {
  float f[2], c[2];
};

// c from a scale and a shift, for each kind of shift.
struct ShiftTerm {
  float by_both, by_scale, by_shift;

  __device__ __forceinline__ float of(float scale, float shift) const {
    return fmaf(fmaf(by_both, shift, by_scale), scale, by_shift * shift);
  }
};

// log2 of the units of K that share a window, and the 16-byte pieces of a window.
struct Windows {
  int log_units, pieces;
};

class RowScale {
 public:
  RowScale() = default;
  // For row n: a lane in the first half of a warp has its scale, one in the second half its shift.
  __device__ __forceinline__ RowScale(const ScaleSource (&sources)[2], int s, int n) {
    const ScaleSource& source = sources[threadIdx.x / 16 % 2];
    row_ = source.row(s, n), stride_ = source.g_bytes;
  }

  // Copies the window that begins with `group`; a row has `groups`.
  __device__ __forceinline__ void copy(uint8_t* to, int pieces, int group, int groups) const {
    const char* from = row_ + group * stride_;
    from -= reinterpret_cast<uintptr_t>(from) % 16;
    const char* const end = row_ + max(groups * stride_, 4);
    to += threadIdx.x % 32 * 16;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i, from += 16, to += kPieceBytes)
      copy_some(to, from, static_cast<int>(min(end - from, Index{16})));
  }

  // The byte at which a group's scale lies in the window that begins with it.
  __device__ __forceinline__ int inside(int group) const {
    return static_cast<int>((reinterpret_cast<uintptr_t>(row_) + group * stride_) % 16);
  }

  // The number `at` bytes into the part of a window that a lane has copied.
  static __device__ __forceinline__ float value(const uint8_t* window, int lane, int at,
                                                Dtype dtype) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(
        window + lane * 16 + (at & ~15) * (kPieceBytes / 16) + (at & 12));
    const uint32_t bits = __funnelshift_r(word, 0, at * 8);
    if (dtype == Dtype::kF16)
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    if (dtype == Dtype::kBF16) return __uint_as_float(bits << 16);
    return dtype == Dtype::kF32 ? __uint_as_float(word) : float_of_byte(bits & 0xffu, dtype);
  }

  // The terms of the group that is `groups` behind byte `inside` of a window; called by all lanes of the warp together.
  __device__ __forceinline__ Terms terms(const uint8_t* window, int inside, int groups,
                                         const ScaleSource (&sources)[2],
                                         const ShiftTerm& shift) const {
    const int lane = threadIdx.x % 32;
    const float mine = value(window, lane, inside + groups * stride_,
                             lane < 16 ? sources[0].dtype : sources[1].dtype);
    const float other = __shfl_xor_sync(~0u, mine, 16);  // in lanes 16 to 31 the scale
    const float c = shift.of(other, mine), term = lane < 16 ? mine : c;
    Terms terms;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      terms.f[r] = __shfl_sync(~0u, term, lane / 4 + 8 * r);
      terms.c[r] = __shfl_sync(~0u, term, lane / 4 + 8 * r + 16);
    }
    return terms;
  }

  static constexpr int kPieceBytes = 512;  // a piece of every lane

 private:
  const char* row_;
  int stride_;
};

}  // namespace jaxgemv::cuda::image
