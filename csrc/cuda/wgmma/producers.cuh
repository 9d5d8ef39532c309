// The parts of the kernel for many rows of x on Hopper (kernel.cuh): how shared memory is laid out,
// and the producers, which stage x.
#pragma once

#include <algorithm>

#include "../common/hopper.cuh"
#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::wgmma {

using namespace hopper;

constexpr int kChunkK = 128;  // k of x and the weights in a stage
constexpr int kStages = 4;    // chunks in shared memory
constexpr int kRows = 256;    // rows of the weights of a CTA
constexpr int kMaxRanks = 8;  // CTAs of a cluster that share K

// For up to kM rows of x: how many warps multiply, and how many stage x. Few rows need few
// registers and leave room for more warps.
template <int kM>
struct Roles {
  static constexpr bool kFew = kM < 64;
  static constexpr int kWarps = kFew ? 16 : 8, kProducers = kFew ? 4 : 8;
  static constexpr int kThreads = 32 * (kWarps + kProducers), kConsumers = 32 * kWarps;
  static constexpr int kTileRows = 16 * kWarps, kTiles = kRows / kTileRows;  // of consumers
  static constexpr int kStep = 4 * kProducers, kUnits = kM / kStep;  // rows of x staged at a time
};

// Shared memory from a multiple of 1024 on: x, weights, barriers, sum(x), scales; at the end y.
template <int kBits, int kM>
struct SharedMemory : Roles<kM> {
  using P = Roles<kM>;
  static constexpr int kAtom = kM * 128;  // 64 k of x, swizzled by 128 bytes
  static constexpr int kStage = kChunkK / 64 * kAtom;
  static constexpr int kPieces = kChunkK * kBits / 512;  // 16-byte pieces of a row in a lane
  static constexpr int kTile = P::kWarps * kPieces * 1024, kChunk = P::kTiles * kTile;
  static constexpr int kWeights = kStages * kStage, kFull = kWeights + kStages * kChunk;
  static constexpr int kEmpty = kFull + 8 * kStages, kSums = kEmpty + 8 * kStages;
  static constexpr int kScales = kSums + 4 * kStages * kM;  // two buffers of four groups
  static constexpr int kBlock = kRows * 16;
  static constexpr int kPitch = kRows + 4;  // no bank twice in a store of y
  static constexpr int kBytes = std::max(kScales + 2 * kBlock, 4 * kM * kPitch) + 1024;
};

// The chunks of K that are this CTA's; chunk i uses stage i % kStages.
struct Share {
  int begin, end;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Each warp stages kUnits times four rows of x: lane = (row % 4, half, t). A lane's 16 bytes are 8 k; word r of them
// goes to word t of 16-byte piece 4 * half + r, of 8, in a row of an atom: that is where A has its codes. sum(x) comes
// from an mma with ones.
template <int kBits, typename X, int kM, bool kPerRow>
__device__ __forceinline__ void produce(const Problem& problem, const Operands& operands,
                                        Share share, uint32_t shared) {
  using L = SharedMemory<kBits, kM>;
  constexpr int kUnits = L::kUnits, kStep = L::kStep;
  constexpr uint32_t kOnes = std::is_same_v<X, __half> ? 0x3c003c00u : 0x3f803f80u;
  const uint32_t full = shared + L::kFull, empty = shared + L::kEmpty;
  const int lane = threadIdx.x % 32, t = lane % 4, half = lane / 4 % 2;
  const int first_m = (threadIdx.x / 32 - L::kWarps) * 4, m = first_m + lane / 8;
  const int M = static_cast<int>(problem.M), K = static_cast<int>(problem.K);
  const uint32_t sums = shared + L::kSums + 4 * (first_m + lane);
  const uint32_t to = shared + m * 128 + (m % 8 ^ 4 * half) * 16 + 4 * t;
  const X* x = static_cast<const X*>(operands.x) + Index{blockIdx.y} * M * K +
               (kBits == 4 ? 32 : 16) * t + 8 * half;
  int row[kUnits];  // rows past the end repeat the last one and are not stored
#pragma unroll
  for (int u = 0; u < kUnits; ++u) row[u] = min(m + kStep * u, M - 1) * K;
  const auto load_unit = [&](uint4(&into)[2], int u, int i) {
    const X* from = x + (row[u] + i * kChunkK);
#pragma unroll
    for (int j = 0; j < 2; ++j) into[j] = load_stream(from + (kBits == 4 ? 16 : 64) * j);
  };

  uint4 v[2][kUnits][2];  // two chunks on their way
#pragma unroll
  for (int p = 0; p < 2; ++p)
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (share.begin + p < share.end) load_unit(v[p][u], u, share.begin + p);
  float total[kUnits][4] = {};
  const int start = share.begin % kStages;
  int stage = start, uses = 0;  // how often this stage has been filled
#pragma unroll 1
  for (int both = share.begin; both < share.end; both += 2) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int i = both + p;
      if (i >= share.end) break;
      float sum[kUnits][4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const uint4 w = v[p][u][j / 2];
          const uint32_t pair[2] = {j % 2 ? w.z : w.x, j % 2 ? w.w : w.y};
          mma_m16n8k16<X>(kPerRow ? total[u] : sum[u], kOnes, kOnes, kOnes, kOnes, pair);
        }
      if (uses > 0) wait(empty + 8 * stage, uses % 2 ^ 1);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 w = v[p][u][j];
          uint32_t words[4] = {w.x, w.y, w.z, w.w};
          if constexpr (kBits == 4) {
            words[0] = __byte_perm(w.x, w.z, 0x5410), words[1] = __byte_perm(w.y, w.w, 0x5410);
            words[2] = __byte_perm(w.x, w.z, 0x7632), words[3] = __byte_perm(w.y, w.w, 0x7632);
          }
#pragma unroll
          for (int r = 0; r < 4; ++r)
            store_shared((to + stage * L::kStage ^ 16 * r) + (j * L::kAtom + u * kStep * 128),
                         words[r]);
        }
        if (i + 2 < share.end) load_unit(v[p][u], u, i + 2);
      }
      if (!kPerRow && lane < 4) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
          store_shared(sums + 4 * (stage * kM + kStep * u), sum[u][0] + sum[u][1]);
      }
      fence_proxy();
      __syncwarp();
      if (lane < 4) arrive(full + 8 * stage);  // the lanes that wrote sums
      stage = (stage + 1) % kStages;
      if (stage == start) ++uses;
    }
  }
  if constexpr (kPerRow) {  // one more stage, with nothing but the sums
    if (uses > 0) wait(empty + 8 * stage, uses % 2 ^ 1);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (lane < 4) store_shared(sums + 4 * kStep * u, total[u][0] + total[u][1]);
    __syncwarp();
    if (lane < 4) arrive(full + 8 * stage);
  }
}

#endif

}  // namespace jaxgemv::cuda::wgmma
