// More rows of x than 64, on Hopper, where rows of weights and x are whole 16 bytes: a product with the dequantised
// weights, each rounded once to x's dtype, that never writes them anywhere but into shared memory.
//
// A CTA has 128 rows of the weights and 128 or 256 of x; the CTAs of a cluster share K. One thread asks for boxes of
// codes, and of x as it is. Some warps decode, two groups of four multiply, with both operands in shared memory.
#pragma once

#include "decode.cuh"
#include "finish.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Asks for codes and x, by one thread. Not one that decodes: fence_proxy() would wait for its copies.
template <typename S>
class Bringer {
 public:
  __device__ __forceinline__ Bringer(const Params& params, const Share& own, int tile,
                                     int first_stage, int stages, const CUtensorMap& weights,
                                     const CUtensorMap& x, uint32_t shared,
                                     const Barriers<S>& barriers)
      : weights_(weights),
        x_(x),
        barriers_(barriers),
        shared_(shared),
        stages_(stages),
        boxes_((stages + kBoxStages - 1) / kBoxStages),
        byte_(own.first_unit * S::kRowBytes),
        row_(tile * kTileRows),
        entry_(params.packed_stack_stride == 0 ? 0 : own.s),  // one matrix may serve all
        k_(first_stage * S::kStageK),
        m_(own.m0) {}

  __device__ __forceinline__ void begin() {
    for (int i = 0; i < S::kSlots; ++i) ask_for_box();
    for (int i = 0; i < S::kStages; ++i) ask_for_x();
  }
  // When stage i is being multiplied, so that it has been decoded; a warp that multiplies asks for x two stages late,
  // when all others have used what that takes the place of.
  __device__ __forceinline__ void next(int i) {
    if (S::kBrings || i > 1) ask_for_x();
    if ((i + 1) % kBoxStages == 0) ask_for_box();
  }

 private:
  static constexpr int kBoxStages = S::kBoxTurns * kTurnStages;
  const CUtensorMap &weights_, &x_;
  const Barriers<S>& barriers_;
  const uint32_t shared_;
  const int stages_, boxes_, byte_, row_, entry_, k_, m_;
  int stage_ = 0, box_ = 0;

  __device__ __forceinline__ void ask_for_box() {
    if (box_ >= boxes_) return;
    const int slot = box_ % S::kSlots;
    if (box_ >= S::kSlots) wait(barriers_.read(slot), box_ / S::kSlots % 2 ^ 1);
    arrive_and_expect(barriers_.came(slot), S::kBoxBytes);
    copy_box(shared_ + S::kBoxes + slot * S::kBoxBytes, weights_, byte_ + box_ * S::kRowBytes, row_,
             entry_, barriers_.came(slot));
    ++box_;
  }
  __device__ __forceinline__ void ask_for_x() {
    if (stage_ >= stages_) return;
    const int stage = stage_ % S::kStages;
    if (stage_ >= S::kStages) wait(barriers_.empty(stage), stage_ / S::kStages % 2 ^ 1);
    arrive_and_expect(barriers_.full(stage), S::kColumns * 128);
    copy_box(shared_ + stage * S::kStageBytes + kXAt, x_, k_ + stage_ * S::kStageK, m_, blockIdx.y,
             barriers_.full(stage), read_again());
    ++stage_;
  }
};

// Rows of 128 bytes, swizzled, as operand A or B: eight of them are 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (at & 0x3ffff) >> 4;
}

template <typename S, typename X>
__device__ __forceinline__ void multiply(int stages, uint32_t shared, const Barriers<S>& barriers,
                                         Bringer<S>* bringer, float (&y)[S::kColumns / 2]) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool tells = threadIdx.x % 32 == 0;
  const uint64_t a = descriptor(shared + warp / 4 * (64 * 128)), b = descriptor(shared + kXAt);
  if (!S::kBrings && threadIdx.x == 0) bringer->begin();
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
      if (tells && first + stage > 0) arrive(barriers.empty((stage + S::kStages - 1) % S::kStages));
      add(stage, 2);
      if (!S::kBrings) {
        if (threadIdx.x == 0) bringer->next(first + stage);
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
                  const __grid_constant__ CUtensorMap x, bool packs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename S::C;
  extern __shared__ __align__(1024) uint8_t base[];  // as the swizzle has it
  __shared__ uint64_t barrier_words[Barriers<S>::kCount];
  __shared__ float table[C::kEntries > 0 ? C::kEntries : 1];
  const auto known = [](uint32_t v) { return static_cast<uint32_t>(kept(static_cast<int>(v))); };
  const uint32_t shared = known(shared_address(base));
  const Barriers<S> barriers{known(shared_address(barrier_words))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be uniform
  const Share own(params);
  const int tile = Share::over(own.cluster, params.m_tiles);
  constexpr int kUnitStages = S::kUnitK / S::kStageK;
  const int first_stage = own.first_unit * kUnitStages;
  const int last_stage =
      min(own.last_unit * kUnitStages, (params.x.K + S::kStageK - 1) / S::kStageK);
  const int stages = own.s < 0 ? 0 : last_stage - first_stage;
  if (threadIdx.x == 0) barriers.init();
  if constexpr (C::kEntries > 0)
    if (own.s >= 0) C::make_table(params.codebook, own.s, table);
  __syncthreads();
  Bringer<S> bringer(params, own, tile, first_stage, stages, weights, x, shared, barriers);
  if (warp >= S::kConsumers + S::kDecoders) {
    if (threadIdx.x % 32 == 0) {
      bringer.begin();
      for (int i = 0; i < stages; ++i) bringer.next(i);
    }
    return;
  }
  if (warp >= S::kConsumers) {
    decode<S, X>(params, max(own.s, 0), tile, first_stage, stages, shared, table, barriers);
    return;
  }
  float y[kColumns / 2] = {};
  multiply<S, X>(stages, shared, barriers, &bringer, y);
  put_octets<S, X>(params, own, tile, y, base, packs);
#endif
}

}  // namespace jaxgemv::cuda::gemm_tma
