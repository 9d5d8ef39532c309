// Scale and shift of the rows of a tile of 16, as the mma_any kernel meets them: each lane copies and
// converts one of the two for one row, whatever their dtypes and strides are.
#pragma once

#include <cmath>

#include "../common/affine.cuh"
#include "../common/ptx.cuh"
#include "image.cuh"

namespace jaxgemv::cuda::mma_any {

// How groups of codes and the slots of a quad go together: a quad of 128 codes has 1, 4 or 8 slots,
// none of which crosses into another group.
struct Groups {
  int slots;
  uint32_t magic;  // 2^31 over the sixteens of a group, rounded up
  int last;        // group

  __device__ __forceinline__ int of(int k) const {
    return min(static_cast<int>(__umulhi(static_cast<uint32_t>(k) / 8 & ~1u, magic)), last);
  }
};

// y += x * dot(q, x) + y * sum(x), for rows g and g + 8 of a lane.
struct Terms {
  float f[2], c[2];
};

// Of one byte, without branches.
__device__ __forceinline__ float float_of_byte(uint32_t byte, Dtype dtype) {
  const float e4m3 = __uint_as_float((byte & 127) << 20) * 0x1p120f;
  if (dtype == Dtype::kE8M0) return __uint_as_float(bits_of_e8m0(byte));
  return (byte & 127) == 127 ? NAN : byte & 128 ? -e4m3 : e4m3;
}

// A parameter with its strides in bytes.
struct ScaleSource {
  const char* data;
  Index stack_bytes;
  int n_bytes, g_bytes;
  Dtype dtype;
};

class RowScale {
 public:
  RowScale() = default;
  // Of row n: this lane has its scale in the first half of a warp, and its shift in the second.
  __device__ __forceinline__ RowScale(const ScaleSource (&sources)[2], int s, int n) {
    const ScaleSource& source = sources[threadIdx.x / 16 % 2];
    data_ = source.data + s * source.stack_bytes + n * Index{source.n_bytes};
    stride_ = source.g_bytes, dtype_ = source.dtype;
  }

  // The aligned word around that of a group, into this lane's word of a slot.
  __device__ __forceinline__ void copy(uint8_t* slot, int group) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(data_ + Index{group} * stride_);
    copy_or_zeros<4>(slot + threadIdx.x % 32 * 4, reinterpret_cast<const void*>(at & ~uintptr_t{3}),
                     true);
  }

  // What was copied, for all lanes of the warp together.
  __device__ __forceinline__ Terms terms(const uint8_t* slot, int group, Affine affine,
                                         float mid) const {
    const uint32_t at = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data_)) +
                        static_cast<uint32_t>(group * stride_);
    const int lane = threadIdx.x % 32;
    const uint32_t bits = reinterpret_cast<const uint32_t*>(slot)[lane] >> (at % 4 * 8);
    float mine = float_of_bits(dtype_ == Dtype::kF32 ? bits : bits & 0xffffu, dtype_);
    if (!is_wide(dtype_)) mine = float_of_byte(bits & 0xffu, dtype_);
    const float other = __shfl_xor_sync(~0u, mine, 16);
    const bool has_scale = lane < 16;
    const float2 term =
        terms_of(affine, has_scale ? mine : other, has_scale ? other : mine, mid, 0);
    Terms terms;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      terms.f[r] = __shfl_sync(~0u, term.x, lane / 4 + 8 * r);
      terms.c[r] = __shfl_sync(~0u, term.y, lane / 4 + 8 * r);
    }
    return terms;
  }

 private:
  const char* data_;
  Dtype dtype_;
  int stride_;
};

}  // namespace jaxgemv::cuda::mma_any
