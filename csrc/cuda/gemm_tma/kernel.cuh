// More rows of x than 64, on Hopper, where rows of weights and x are whole 16 bytes: a product with the dequantised
// weights, each rounded once to x's dtype, that never writes them anywhere but into shared memory.
//
// A tile has 128 rows of the weights and 128 or 256 of x; a CTA has one after another, so that the next is decoded
// while results of the last are written. CTAs of a cluster share K, or are pairs for 512 rows of x that decode half of
// the weights each and send it to the other. One thread asks for boxes of codes, and of x as it is. Some warps decode,
// two groups of four multiply, with both operands in shared memory.
#pragma once

#include "../common/wgmma.cuh"
#include "copies.cuh"
#include "decode.cuh"
#include "finish.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The descriptor of operand A or B: rows of 128 bytes, swizzled; eight of them are 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (at & 0x3ffff) >> 4;
}

// What a warp that multiplies keeps from one tile to the next.
template <typename S, typename X>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params& params, const Work<S>& own, uint32_t shared,
                                        const Barriers<S>& barriers, Bringer<S>* bringer)
      : own_(own),
        barriers_(barriers),
        bringer_(*bringer),
        sender_(params, own, shared, barriers),
        a_(descriptor(shared + warp() / 4 * (64 * 128))),
        b_(descriptor(shared + kXAt)),
        rounded_(own.rounded()),
        tells_(threadIdx.x % 32 == 0),
        brings_(!S::kBrings && threadIdx.x == 0),
        paired_(S::kPairs && own.ctas > 1),
        // The first thread of the second four warps: that of the first four asks for x.
        sends_(paired_ && threadIdx.x == 128) {
    if (brings_) bringer_.begin();
  }

  // Multiplies all of K that this CTA has, for one tile.
  __device__ __forceinline__ void multiply(float (&y)[S::kColumns / 2]) {
    // Two of a stage's four products are on their way whenever something else is done.
    const auto add = [&](int stage, int first) {
      wgmma_fence();
#pragma unroll
      for (int step = first; step < first + 2; ++step) {
        const uint32_t at = (stage * S::kStageBytes + step * 32) / 16;
        wgmma_m64k16<X>(y, a_ + at, b_ + at, true);
      }
      wgmma_commit();
    };
    const int stages = own_.stages;
    int parity = done_ / S::kStages % 2;
    if (sends_) sender_.send_up_to(done_ + 1);
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < stages; first += S::kStages, parity ^= 1)
#pragma unroll
      for (int stage = 0; stage < S::kStages; ++stage) {
        if (first + stage >= stages) break;
        wait(barriers_.full(stage), parity);
        add(stage, 0);
        wgmma_wait<1>();
        if (first + stage > 0) used((stage + S::kStages - 1) % S::kStages);
        if (paired_) {
          if (sends_) sender_.send(false);
          __syncwarp();
        }
        add(stage, 2);
        go_on(first + stage);
      }
    wgmma_wait<0>();
    wgmma_done(y);
    if (stages > 0) used((kept(stages) - 1) % S::kStages);
    // Empty stages behind K, up to where the next tile may begin.
#pragma unroll 1
    for (int stage = stages; stage < rounded_; ++stage) {
      wait(barriers_.full(stage % S::kStages), (done_ + stage) / S::kStages % 2);
      used(stage % S::kStages);
      go_on(stage);
    }
    done_ += rounded_;
  }

 private:
  const Work<S>& own_;
  const Barriers<S>& barriers_;
  Bringer<S>& bringer_;
  Sender<S> sender_;
  const uint64_t a_, b_;
  const int rounded_;
  const bool tells_, brings_, paired_, sends_;
  int done_ = 0;  // stages of tiles before

  static __device__ __forceinline__ int warp() { return uniform(threadIdx.x / 32); }

  __device__ __forceinline__ void used(int stage) const {
    if (!tells_) return;
    arrive(barriers_.empty(stage));
    if (paired_) sender_.tell_empty(stage);
  }
  // Called behind stage i of the tile.
  __device__ __forceinline__ void go_on(int i) {
    if (S::kBrings) return;
    if (brings_) bringer_.next(i);
    if (sends_) sender_.send_up_to(done_ + i + 2);
    __syncwarp();
  }
};

#endif

template <Format kFormat, int kBits, typename X, int kColumns,
          typename S = Shape<kFormat, kBits, X, kColumns>>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemv_gemm_tma(const Params params, const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap x, int pair, Loads loads, QuadScales scales,
                  bool packs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename S::C;
  extern __shared__ __align__(1024) uint8_t base[];  // as the swizzle needs it
  __shared__ uint64_t barrier_words[Barriers<S>::kCount];
  __shared__ float table[C::kEntries > 0 ? C::kEntries : 1];
  wait_for_earlier();
  const auto known = [](uint32_t v) { return static_cast<uint32_t>(kept(static_cast<int>(v))); };
  const uint32_t shared = known(shared_address(base));
  const Barriers<S> barriers{known(shared_address(barrier_words))};
  const int warp = uniform(threadIdx.x / 32);
  const Work<S> own(params, pair);
  if (threadIdx.x == 0) barriers.init(own);
  if constexpr (C::kEntries > 0)
    if (own.s >= 0) C::make_table(params.codebook, own.s, table);
  own.ctas > 1 ? sync_cluster() : __syncthreads();
  if constexpr (S::kBrings)
    if (warp >= S::kConsumers + S::kDecoders) {
      if (threadIdx.x % 32 != 0) return;
      Bringer<S> bringer(params, own, weights, x, shared, barriers);
      bringer.begin();
      own.each_tile(params, [&](const Tile&) {
        for (int i = 0; i < own.rounded(); ++i) bringer.next(i);
      });
      return;
    }
  if (warp >= S::kConsumers) {
    if (S::kPairs) setmaxnreg_dec<104>();
    if (own.stages == 0) return;
    if constexpr (C::kEntries > 0 && sizeof(X) == 2)
      if (scales.bytes > 0 && is_e2m1(table))
        return decode(params, own, shared, barriers,
                      [&](int n) { return E2M1Row<X>(params, own.s, n, scales); });
    if (params.groups.slots > 1)
      return decode(params, own, shared, barriers,
                    [&](int n) { return RoundedRow<S, X, true>(params, own.s, n, loads, table); });
    return decode(params, own, shared, barriers,
                  [&](int n) { return RoundedRow<S, X, false>(params, own.s, n, loads, table); });
  }
  if (S::kPairs) setmaxnreg_inc<200>();
  // Used by the first thread, or by none (S::kBrings).
  Bringer<S> bringer(params, own, weights, x, shared, barriers);
  Multiplier<S, X> multiplier(params, own, shared, barriers, &bringer);
  own.each_tile(params, [&](const Tile& tile) {
    float y[kColumns / 2] = {};
    multiplier.multiply(y);
    put_octets<S, X>(params, own, tile, y, base, packs);
  });
  if (own.ctas > 1) sync_cluster();  // what is sent there arrives before the other ends
#endif
}

}  // namespace jaxgemv::cuda::gemm_tma
