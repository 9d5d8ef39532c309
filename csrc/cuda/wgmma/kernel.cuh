// Many rows of x on Hopper: wgmma with the weights from registers and x from shared memory.
//
// A CTA computes kRows rows of y^T, or with a cluster its share of K of them. Some warps, the
// producers, stage x chunk by chunk; the others, the consumers, copy the weights they will need
// into shared memory, each lane its own 16 bytes, turn them into A fragments as mma_any does
// (natural order in memory, k permuted), and multiply. The affine part is two fp32 terms a group:
// y += f * dot(q, x) + c * sum(x).
#pragma once

#include <cooperative_groups.h>

#include <cmath>

#include "../common/epilogue.cuh"
#include "../common/grid.cuh"
#include "consumers.cuh"

namespace jaxgemv::cuda::wgmma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Stores four outputs; if `pack`, at once: then `at` and N are multiples of four.
__device__ __forceinline__ void store4(void* y, Dtype dtype, Index at, bool pack, float4 v) {
  if (!pack) {
    store(y, dtype, at, v.x), store(y, dtype, at + 1, v.y);
    store(y, dtype, at + 2, v.z), store(y, dtype, at + 3, v.w);
  } else {
    cuda::store4(y, dtype, at, v);
  }
}

#endif

template <int kBits, typename X, int kM, bool kPerRow>
__global__ void __launch_bounds__(Roles<kM>::kThreads, 1)
    gemv_wgmma(const Problem problem, const Operands operands, const bool wide) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = SharedMemory<kBits, kM>;
  extern __shared__ uint8_t dynamic[];
  wait_for_earlier();
  const uint32_t shared = (shared_address(dynamic) + 1023) & ~1023u;
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = cluster.block_rank(), ranks = cluster.num_blocks();
  const int warp = uniform(threadIdx.x / 32);
  const int N = static_cast<int>(problem.N), M = static_cast<int>(problem.M);
  const int s = stack_entry(operands.index, problem.stack, blockIdx.y);
  const int chunks = s < 0 ? 0 : static_cast<int>(problem.K) / kChunkK;
  const Share share{chunks * rank / ranks, chunks * (rank + 1) / ranks};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared + L::kFull + 8 * i, 4 * L::kProducers);
      init_barrier(shared + L::kEmpty + 8 * i, L::kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();

  // The registers of all warps are 64 K together, 60 K where there are 20 warps.
  if (warp >= L::kWarps) {
    setmaxnreg_dec<L::kFew ? 64 : kPerRow ? 80 : 56>();
    produce<kBits, X, kM, kPerRow>(problem, operands, share, shared);
    return;
  }
  setmaxnreg_inc<L::kFew ? 104 : kPerRow ? 176 : 200>();
  // The last CTA begins early enough to have kRows rows too; those computed twice come out the same twice.
  const int n0 = min(static_cast<int>(blockIdx.x) / ranks * kRows, N - kRows);
  float y[L::kTiles][kM / 2];
  consume<kBits, X, kM, kPerRow>(problem, operands, share, shared, s, n0, wide, y);

  uint32_t thread;  // read again, so as not to be kept through the loop
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int n_of_y = thread / 32 * 16 + thread / 4 % 8, m_of_y = thread % 4 * 2;
  sync_threads(L::kConsumers);
  float* const partial = reinterpret_cast<float*>(dynamic + (shared - shared_address(dynamic)));
#pragma unroll
  for (int j = 0; j < L::kTiles; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = n_of_y + L::kTileRows * j + 8 * r;
      const bool has_bias = operands.bias.data != nullptr && rank == 0 && s >= 0;
      const float bias = has_bias ? load(operands.bias, s, n0 + n, 0) : 0.f;
#pragma unroll
      for (int e = 0; e < kM / 4; ++e)
        partial[(8 * (e / 2) + m_of_y + e % 2) * L::kPitch + n] =
            y[j][e / 2 * 4 + 2 * r + e % 2] + bias;
    }
  if (ranks > 1)
    cluster.sync();
  else
    sync_threads(L::kConsumers);

  // The shares of K, added in the order of the ranks.
  const bool pack = problem.y != Dtype::kF32 && N % 4 == 0;
#pragma unroll 1
  for (int e = rank * L::kConsumers + thread; e < M * (kRows / 4); e += L::kConsumers * ranks) {
    const int m = e / (kRows / 4), n = e % (kRows / 4) * 4, at = m * L::kPitch + n;
    float4 sum = *reinterpret_cast<const float4*>(
        (ranks > 1 ? cluster.map_shared_rank(partial, 0) : partial) + at);
    if (ranks > 1) {
      float4 part[kMaxRanks];
#pragma unroll
      for (int r = 1; r < kMaxRanks; ++r)
        if (r < ranks)
          part[r] = *reinterpret_cast<const float4*>(cluster.map_shared_rank(partial, r) + at);
#pragma unroll
      for (int r = 1; r < kMaxRanks; ++r)
        if (r < ranks)
          sum.x += part[r].x, sum.y += part[r].y, sum.z += part[r].z, sum.w += part[r].w;
    }
    if (s < 0) sum = {NAN, NAN, NAN, NAN};
    store4(operands.y, problem.y, (Index{blockIdx.y} * M + m) * N + n0 + n, pack, sum);
  }
  if (ranks > 1) cluster.sync();  // the others have read this CTA's shared memory
#endif
}

}  // namespace jaxgemv::cuda::wgmma
