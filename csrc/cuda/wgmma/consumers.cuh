// The consumers of the kernel for many rows of x on Hopper (kernel.cuh): weights to operands,
// products, terms.
#pragma once

#include "../common/codes.cuh"
#include "../common/wgmma.cuh"
#include "producers.cuh"

namespace jaxgemv::cuda::wgmma {

// One word of codes as A registers: f[step][h] is two codes for slots 2t, 2t + 1 (h = 0) or 2t + 8,
// 2t + 9 of a step of 16 k. For 4 bits the codes are (k0, k4), (k2, k6) and (k1, k5), (k3, k7); for
// 8 bits (k0, k1), (k2, k3).
template <int kBits, typename X>
struct Fragments : Codes<Format::kAffine, kBits, X> {
  using C = Codes<Format::kAffine, kBits, X>;
  static constexpr int kSteps = C::kProducts;
  static __device__ __forceinline__ void of(uint32_t w, uint32_t (&f)[kSteps][2]) {
    if constexpr (kBits == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i / 2][i % 2] = C::product(w, i / 2, i % 2);
    } else {
      f[0][0] = C::numbers(__byte_perm(w, 0, 0x4140), 0);
      f[0][1] = C::numbers(__byte_perm(w, 0, 0x4342), 0);
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// y[j][4 p + 2 r + e]: row g + 8 r of the warp's 16 of tile j, column 8 p + 2 t + e.
template <int kBits, typename X, int kM, bool kPerRow>
__device__ __forceinline__ void consume(const Problem& problem, const Operands& operands,
                                        Share share, uint32_t shared, int s, int n0, bool wide,
                                        float (&y)[Roles<kM>::kTiles][kM / 2]) {
  using C = Fragments<kBits, X>;
  using L = SharedMemory<kBits, kM>;
  constexpr int kTiles = L::kTiles;
  const uint32_t full = shared + L::kFull, empty = shared + L::kEmpty;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int n = n0 + 16 * warp + lane / 4;
  const int row_bytes = static_cast<int>(problem.K) / 8 * kBits;
  const uint8_t* w = operands.packed + s * operands.packed_stack_stride + n * Index{row_bytes} +
                     (share.begin * L::kPieces * 64 + 16 * t);
  const uint32_t slot = shared + L::kWeights + warp * (L::kPieces * 1024) + lane * 16;

  // Lane t of a quad has scale (t < 2) or shift, of row g (t even) or g + 8. `wide`: a group is a
  // chunk, and the four groups of a round of chunks are 8 bytes, copied beside the weights.
  const Param& param = t < 2 ? operands.scale : operands.shift;
  const Dtype dtype = operands.scale.dtype;
  const int size = size_of(dtype), g_stride = static_cast<int>(param.g_stride) * size;
  const int tile_stride = L::kTileRows * static_cast<int>(param.n_stride) * size;
  const uint8_t* groups = static_cast<const uint8_t*>(param.data) +
                          (s * param.stack_stride + (n + t % 2 * 8) * param.n_stride) * size;
  const uint32_t scales = shared + L::kScales + warp * (kTiles * 256) + lane * 8;
  const int per_group = kPerRow ? 1 : static_cast<int>(problem.group) / kChunkK;
  int group = share.begin / per_group, left = per_group - share.begin % per_group;

  const auto copy_chunk = [&](int i, int stage) {
    if (i < share.end) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (!kPerRow && wide && (stage == 0 || i == share.begin))
          copy_async<8>(scales + (i / kStages % 2 * L::kBlock + j * 256),
                        groups + (j * tile_stride + (i - stage) * 2));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int p = 0; p < L::kPieces; ++p)
            copy_async<16>(slot + (stage * L::kChunk + j * L::kTile + p * 1024 + r * 512),
                           w + ((L::kTileRows * j + 8 * r) * Index{row_bytes} + 64 * p));
      }
      w += L::kPieces * 64;
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy_chunk(share.begin + i, (share.begin + i) % kStages);

  uint32_t row_bits[kTiles] = {};  // of the row's one group
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
    if (kPerRow && share.begin < share.end)
      row_bits[j] = load_bits(groups + j * tile_stride, dtype, 0);

  // Lanes t < 2 make f = scale * kWorth, the others c, both as (at0 + at1 * v) * scale + at2 * v.
  const bool makes_c = t >= 2, is_mid = problem.affine == Affine::kSymmetric;
  const float at0 = makes_c ? -(is_mid ? mid_code(kBits) : 0) : C::kWorth;
  const float at1 = makes_c && problem.affine == Affine::kZero ? -1.f : 0.f;
  const float at2 = makes_c && problem.affine == Affine::kOffset ? 1.f : 0.f;
  float f[kTiles][2], c[kTiles][2];
  const auto make_terms = [&](int j, uint32_t bits) {
    const float v = float_of_bits(bits, dtype), scale = __shfl_sync(~0u, v, t & 1, 4);
    const float term = fmaf(fmaf(at1, v, at0), scale, at2 * v);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      f[j][r] = __shfl_sync(~0u, term, r, 4), c[j][r] = __shfl_sync(~0u, term, 2 + r, 4);
  };

  float dot[kTiles][kM / 2];
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < kM / 2; ++e) y[j][e] = 0, dot[j][e] = 0;
  const auto add_dot = [&](int j) {
#pragma unroll
    for (int e = 0; e < kM / 2; ++e)
      if (!kPerRow) y[j][e] = fmaf(f[j][e / 2 % 2], dot[j][e], y[j][e]);
  };
  const auto add_sums = [&](int stage) {
#pragma unroll
    for (int p = 0; p < kM / 8; ++p) {
      const float2 sum = load_shared_pair(shared + L::kSums + 8 * t + 4 * (stage * kM + 8 * p));
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          y[j][4 * p + e] = fmaf(c[j][e / 2], e % 2 ? sum.y : sum.x, y[j][4 * p + e]);
    }
  };
  uint4 q[2];
  const auto load_words = [&](int stage, int j, int p) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      q[r] = load_shared16(slot + (stage * L::kChunk + j * L::kTile + p * 1024 + r * 512));
  };

  // K-major, 8 rows of 128 swizzled bytes in 1024 (PTX ISA, "matrix descriptor").
  const uint64_t b = uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | shared >> 4;
  const int start = share.begin % kStages;
  int parity = 0;
  // In rounds of kStages chunks, so that addresses in shared memory are constants.
#pragma unroll 1
  for (int round = share.begin - start; round < share.end; round += kStages, parity ^= 1) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int i = round + stage;
      if (i < share.begin) continue;
      if (i >= share.end) break;
      wait_copies<kStages - 1>();
      if constexpr (!kPerRow) {
        uint32_t bits[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          bits[j] =
              wide ? load_shared2(scales + (round / kStages % 2 * L::kBlock + j * 256 + 2 * stage))
                   : load_bits(groups + (j * tile_stride + group * g_stride), dtype, 0);
        if (--left == 0) ++group, left = per_group;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) make_terms(j, bits[j]);
      }
      wait(full + 8 * stage, parity ^ (stage < start));
      load_words(stage, 0, 0);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {  // two steps of 16 k: one word of 4 bits, or two of 8
          uint32_t f0[2 / C::kSteps][C::kSteps][2], f1[2 / C::kSteps][C::kSteps][2];
          const uint32_t words0[4] = {q[0].x, q[0].y, q[0].z, q[0].w};
          const uint32_t words1[4] = {q[1].x, q[1].y, q[1].z, q[1].w};
#pragma unroll
          for (int k = 0; k < 2 / C::kSteps; ++k) {
            const int word = (h * 2 / C::kSteps + k) % 4;
            C::of(words0[word], f0[k]), C::of(words1[word], f1[k]);
          }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint32_t (&a0)[2] = f0[k / C::kSteps][k % C::kSteps];
            const uint32_t (&a1)[2] = f1[k / C::kSteps][k % C::kSteps];
            const uint32_t a[4] = {a0[0], a1[0], a0[1], a1[1]};
            const int at = stage * L::kStage + h / 2 * L::kAtom + (h % 2 * 2 + k) * 32;
            wgmma_m64k16<X>(dot[j], a, b + at / 16, (kPerRow && i > share.begin) || h + k > 0);
          }
          wgmma_commit();
          // While the products run: the next words, then what does not need their results.
          if (h == 1 && L::kPieces == 2) load_words(stage, j, 1);
          if (h == 3 && j + 1 < kTiles) load_words(stage, j + 1, 0);
          if (h == 3 && j + 1 == kTiles) copy_chunk(i + kStages, stage);
          if (!kPerRow && h == 3 && j == 0) add_sums(stage);
          if (j + h > 0 && (j + 1 < kTiles || h < 3)) wgmma_wait<1>();
          if (j > 0 && h == 0) wgmma_done(dot[j - 1]);
          if (j > 0 && h == 1) add_dot(j - 1);
        }
      }
      wgmma_wait<0>();
      wgmma_done(dot[kTiles - 1]);
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * stage);
      add_dot(kTiles - 1);
    }
  }
  if constexpr (kPerRow) {
    wait(full + 8 * (share.end % kStages), (share.end - share.begin) / kStages % 2);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      make_terms(j, row_bits[j]);
#pragma unroll
      for (int e = 0; e < kM / 2; ++e) y[j][e] = f[j][e / 2 % 2] * dot[j][e];
    }
    add_sums(0);
  }
}

#endif

}  // namespace jaxgemv::cuda::wgmma
