// More rows of x than 64, on Hopper, where rows of weights and x are whole 16 bytes: a product with the dequantised
// weights, each rounded once to x's dtype, that never writes them anywhere but into shared memory.
//
// A CTA has 128 rows of the weights and 128 or 256 of x; the CTAs of a cluster share K, or are pairs for 512 rows of x
// that decode half of the weights each and send it to the other. One thread asks for boxes of codes, and of x as it is.
// Some warps decode, two groups of four multiply, with both operands in shared memory.
#pragma once

#include "copies.cuh"
#include "decode.cuh"
#include "finish.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rows of 128 bytes, swizzled, as operand A or B: eight of them are 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (at & 0x3ffff) >> 4;
}

template <typename S, typename X>
__device__ __forceinline__ void multiply(const Work<S>& own, int stages, uint32_t shared,
                                         const Barriers<S>& barriers, Bringer<S>* bringer,
                                         float (&y)[S::kColumns / 2]) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool tells = threadIdx.x % 32 == 0;
  const uint64_t a = descriptor(shared + warp / 4 * (64 * 128)), b = descriptor(shared + kXAt);
  if (!S::kBrings && threadIdx.x == 0) bringer->begin();
  // The first thread of the second four warps: that of the first four asks for x.
  const bool paired = S::kPairs && own.ctas > 1, sends = paired && threadIdx.x == 128;
  Sender<S> sender(own, stages, shared, barriers);
  if (sends) sender.send(0);
  __syncwarp();
  int parity = 0;
  // Two of a stage's four products are on their way whenever something else is done.
  const auto add = [&](int stage, int first) {
    wgmma_fence();
#pragma unroll
    for (int step = first; step < first + 2; ++step) {
      const uint32_t at = (stage * S::kStageBytes + step * 32) / 16;
      wgmma_m64k16<X>(y, a + at, b + at, true);
    }
    wgmma_commit();
  };
#pragma unroll 1
  for (int first = 0; first < stages; first += S::kStages, parity ^= 1)
#pragma unroll
    for (int stage = 0; stage < S::kStages; ++stage) {
      if (first + stage >= stages) break;
      wait(barriers.full(stage), parity);
      add(stage, 0);
      wgmma_wait<1>();
      if (tells && first + stage > 0) {
        const int before = (stage + S::kStages - 1) % S::kStages;
        arrive(barriers.empty(before));
        if (paired) sender.tell_empty(before);
      }
      if (paired) {
        if (sends) sender.send(0);
        __syncwarp();
      }
      add(stage, 2);
      if (!S::kBrings) {
        if (threadIdx.x == 0) bringer->next(first + stage);
        if (sends) sender.send(first + stage + 1);
        __syncwarp();
      }
    }
  wgmma_wait<0>();
  wgmma_done(y);
}

#endif

template <Format kFormat, int kBits, typename X, int kColumns,
          typename S = Shape<kFormat, kBits, X, kColumns>>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemv_gemm_tma(const Params params, const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap x, int pair, QuadScales scales, bool packs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename S::C;
  extern __shared__ __align__(1024) uint8_t base[];  // as the swizzle has it
  __shared__ uint64_t barrier_words[Barriers<S>::kCount];
  __shared__ float table[C::kEntries > 0 ? C::kEntries : 1];
  const auto known = [](uint32_t v) { return static_cast<uint32_t>(kept(static_cast<int>(v))); };
  const uint32_t shared = known(shared_address(base));
  const Barriers<S> barriers{known(shared_address(barrier_words))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be uniform
  const Work<S> own(params, pair);
  const int tile = Share::over(own.cluster, params.m_tiles);
  constexpr int kUnitStages = S::kUnitK / S::kStageK;
  const int first_stage = own.first_unit * kUnitStages;
  const int last_stage =
      min(own.last_unit * kUnitStages, (params.x.K + S::kStageK - 1) / S::kStageK);
  const int stages = own.s < 0 ? 0 : last_stage - first_stage;
  if (threadIdx.x == 0) barriers.init(own);
  if constexpr (C::kEntries > 0)
    if (own.s >= 0) C::make_table(params.codebook, own.s, table);
  own.ctas > 1 ? sync_cluster() : __syncthreads();
  Bringer<S> bringer(params, own, tile, first_stage, stages, weights, x, shared, barriers);
  if (warp >= S::kConsumers + S::kDecoders) {
    if (threadIdx.x % 32 == 0) {
      bringer.begin();
      for (int i = 0; i < stages; ++i) bringer.next(i);
    }
    return;
  }
  if (warp >= S::kConsumers) {
    const int s = max(own.s, 0), n = min(tile * kTileRows + row_to_decode(own), params.width - 1);
    const auto decode_as = [&](auto&& row) {
      decode(own, row, first_stage, stages, shared, barriers);
    };
    if constexpr (C::kEntries > 0 && sizeof(X) == 2)
      if (scales.bytes > 0 && is_e2m1(table)) return decode_as(E2M1Row<X>(params, s, n, scales));
    decode_as(RoundedRow<S, X>(params, s, n, table));
    return;
  }
  float y[kColumns / 2] = {};
  multiply<S, X>(own, stages, shared, barriers, &bringer, y);
  put_octets<S, X>(params, own, tile, y, base, packs);
#endif
}

}  // namespace jaxgemv::cuda::gemm_tma
