// The end of the transposed kernels: adds up the sums of the warps of a CTA, and then of the CTAs of a cluster,
// which share the rows of the weights.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>

#include "../common/launch.cuh"
#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::transposed {

constexpr int kWarps = 8;
constexpr int kMaxRanks = 8;  // CTAs of a cluster

// The fields of jaxgemv::Problem and Operands that the kernels need. (With all fields, or in one struct, some
// kernels spill on sm_100 or sm_120.)
struct Problem {
  Index batch, stack, M, N, K, group;
  int bits;
  Dtype x, y;
  Affine affine;
};

struct Operands {
  const void* x;
  const uint8_t* packed;
  Index packed_stack_stride;
  Param scale, shift, codebook;
  const int32_t* index;
  void* y;
};

// The CTAs that share the rows of the weights: a cluster, or where there are none the CTA alone.
struct Team {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  __device__ int rank() const { return cluster.block_rank(); }
  __device__ int ranks() const { return cluster.num_blocks(); }
  __device__ void sync() const { cluster.sync(); }
  __device__ const float* of_rank(float* mine, int rank) const {
    return cluster.map_shared_rank(mine, rank);
  }
#else
  __device__ int rank() const { return 0; }
  __device__ int ranks() const { return 1; }
  __device__ void sync() const { __syncthreads(); }
  __device__ const float* of_rank(float* mine, int) const { return mine; }
#endif
};

// The same as cuda::store, whose switch makes a kernel spill on sm_120.
__device__ __forceinline__ void store_wide(void* data, Dtype dtype, Index i, float v) {
  if (dtype == Dtype::kF32)
    static_cast<float*>(data)[i] = v;
  else if (dtype == Dtype::kF16)
    static_cast<__half*>(data)[i] = __float2half_rn(v);
  else
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(v);
}

// The sums of each warp, for kRows rows of y and a tile of K, of which each of kLanes
// lanes has kLaneCodes in a row. The padding keeps lanes on banks of their own.
template <int kRows, int kLaneCodes, int kLanes>
struct Parts {
  static constexpr int kTileK = kLanes * kLaneCodes, kPitch = kTileK + kLanes + 4;
  float of_warp[kWarps][kRows * kPitch];

  static __device__ __forceinline__ int at(int m, int k) { return m * kPitch + k + k / kLaneCodes; }

  // y[row + m, k0 + k] for m < rows, from the parts that all threads of the team have written.
  __device__ void store(const Team& team, const Problem& problem, const Operands& operands,
                        Index row, int rows, Index k0, bool valid) {
    constexpr int kThreads = kWarps * 32;
    __syncthreads();
    for (int e = threadIdx.x; e < rows * kTileK; e += kThreads) {
      const int i = at(e / kTileK, e % kTileK);
      float sum = of_warp[0][i];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += of_warp[w][i];
      of_warp[0][i] = sum;
    }
    team.sync();
    const int ranks = team.ranks();
    for (int e = team.rank() * kThreads + threadIdx.x; e < rows * kTileK; e += ranks * kThreads) {
      const int m = e / kTileK, k = e % kTileK;
      if (k0 + k >= problem.K) continue;
      float sum = 0;
      for (int r = 0; r < ranks; ++r) sum += team.of_rank(of_warp[0], r)[at(m, k)];
      store_wide(operands.y, problem.y, (row + m) * problem.K + k0 + k, valid ? sum : NAN);
    }
    team.sync();  // before this CTA's part is written anew, or gone
  }
};

// tiles: of y, for each slice of x. As many CTAs share N as put `ctas_an_sm` CTAs on each SM.
inline cudaError_t launch(void (*kernel)(Problem, Operands), Index tiles, int ctas_an_sm,
                          Index rows_a_round, const jaxgemv::Problem& problem,
                          const jaxgemv::Operands& operands, const Device& device,
                          cudaStream_t stream) {
  const Index wanted = Index{device.sms} * ctas_an_sm / (tiles * problem.batch);
  const Index rounds = ceil_div(problem.N, rows_a_round);
  const Index most = std::min<Index>(device.major >= 9 ? kMaxRanks : 1, rounds);
  LaunchShape shape = {{}, kWarps * 32};
  shape.ranks = static_cast<int>(std::clamp<Index>(wanted, 1, most));
  if (!make_grid(tiles * shape.ranks, problem.batch, &shape.grid))
    return cudaErrorInvalidConfiguration;
  const Problem p = {problem.batch, problem.stack, problem.M, problem.N, problem.K,
                     problem.group, problem.bits,  problem.x, problem.y, problem.affine};
  const Operands o = {operands.x,     operands.packed, operands.packed_stack_stride,
                      operands.scale, operands.shift,  operands.codebook,
                      operands.index, operands.y};
  return launch_kernel(kernel, shape, device, stream, p, o);
}

}  // namespace jaxgemv::cuda::transposed
