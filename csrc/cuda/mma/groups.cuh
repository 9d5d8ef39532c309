// Scale and shift of the groups that the mma kernel meets: how they are loaded, and made into terms.
#pragma once

#include "../common/affine.cuh"
#include "../common/params.cuh"

namespace jaxgemv::cuda::mma {

constexpr int kUnroll = 4;  // chunks in flight; 4 is built into GroupLoader

// How scale and shift lie. kChunks, kPairs: a group is one chunk, or two; 16-bit, of one layout,
// and the groups of kUnroll chunks are one aligned load. kOne: one group a row. For all but kAny, K
// is a multiple of kUnroll chunks, so that no load needs a bound, and scales are wide.
enum class Groups { kAny, kChunks, kPairs, kOne };

// Groups in a round of kUnroll chunks.
constexpr int groups_in_round(Groups groups) {
  return groups == Groups::kChunks ? kUnroll : groups == Groups::kPairs ? kUnroll / 2 : 0;
}

// Each lane of a quad loads one of the four values of a group that all of them need: scale or shift
// (t / 2), of row g or g + 8 (t % 2). `load` keeps the raw bits, so that waiting for them does not
// hold up the loads of x behind it; `get` converts.
template <Groups kGroups>
struct GroupLoader {
  static constexpr bool kAlike = kGroups == Groups::kChunks || kGroups == Groups::kPairs;
  const Param& param;
  const uint8_t* data;  // group 0 of the row
  int chunks, chunks_per_group;
  uint32_t raw[kUnroll];

  __device__ __forceinline__ GroupLoader(const Problem& problem, const Operands& operands, int t,
                                         int s, int row, int chunk_k)
      : param(kAlike || t < 2 ? operands.scale : operands.shift),
        data(static_cast<const uint8_t*>(t < 2 ? operands.scale.data : operands.shift.data)),
        chunks((static_cast<int>(problem.K) + chunk_k - 1) / chunk_k),
        chunks_per_group(max(static_cast<int>(problem.group) / chunk_k, 1)) {
    const int size = kAlike ? 2 : size_of(param.dtype);
    if (operands.index != nullptr) data += s * param.stack_stride * size;
    data += Index{row} * (static_cast<int>(param.n_stride) * size);
  }

  // The groups of chunks [chunk, chunk + kUnroll); those past the last repeat it.
  __device__ __forceinline__ void load(int chunk) {
    if constexpr (kGroups == Groups::kChunks) {
      const uint2 four = __ldg(reinterpret_cast<const uint2*>(data + chunk * 2));
      raw[0] = four.x, raw[1] = four.y;
    } else if constexpr (kGroups == Groups::kPairs) {
      raw[0] = __ldg(reinterpret_cast<const uint32_t*>(data + chunk));
    } else if constexpr (kGroups == Groups::kOne) {
      raw[0] = load_bits(data, param.dtype, 0);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int group = min(chunk + u, chunks - 1) / chunks_per_group;
        const int i = group * static_cast<int>(param.g_stride);
        raw[u] = is_wide(param.dtype) ? load_bits(data, param.dtype, i) : __ldg(data + i);
      }
    }
  }

  __device__ __forceinline__ float get(int u) const {
    if constexpr (kAlike) {
      const int i = kGroups == Groups::kPairs ? u / 2 : u;
      return float_of_bits(i % 2 ? raw[i / 2] >> 16 : raw[i / 2] & 0xffffu, param.dtype);
    }
    if (kGroups == Groups::kAny && !is_wide(param.dtype))
      return __uint_as_float(float32_bits(raw[u], param.dtype));
    return float_of_bits(raw[kGroups == Groups::kOne ? 0 : u], param.dtype);
  }
};

// For the rows g and g + 8 of a lane: y += f * dot(q, x) + c * sum(x).
struct GroupTerms {
  float f[2], c[2];

  // v: the quad's four values of the group.
  __device__ __forceinline__ GroupTerms(float v, Affine affine, float mid) {
    const int quad = threadIdx.x & 28;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = __shfl_sync(~0u, v, quad + r);
      const float shift = __shfl_sync(~0u, v, quad + 2 + r);
      const float2 terms = terms_of(affine, scale, shift, mid);
      f[r] = terms.x, c[r] = terms.y;
    }
  }
};

}  // namespace jaxgemv::cuda::mma
