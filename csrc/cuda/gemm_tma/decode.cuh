// Weights, from codes to operand A in shared memory, each rounded once. A thread has a row.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scales and shifts of a row, asked for a turn of this thread's before they are used.
template <typename S>
class RowTerms {
 public:
  __device__ __forceinline__ RowTerms(const Params& params, int s, int n)
      : params_(params),
        scale_(params.scales[0].row(s, n)),
        shift_(S::C::kHasShift ? params.scales[1].row(s, n) : nullptr) {}

  __device__ __forceinline__ void ask(int k) {
    each([&](int i) {
      const int group = params_.groups.of(k + i * kSlotK);
      scale_bits_[i] = bits_at(scale_, group, params_.scales[0]);
      if constexpr (S::C::kHasShift) shift_bits_[i] = bits_at(shift_, group, params_.scales[1]);
    });
  }
  // w = f * q + c, of what has been asked for.
  __device__ __forceinline__ void take() {
    each([&](int i) {
      f_[i] = number(scale_bits_[i], params_.scales[0].dtype);
      if constexpr (S::C::kHasShift)
        c_[i] = params_.shift.of(f_[i], number(shift_bits_[i], params_.scales[1].dtype));
    });
  }
  // Whether the 32 codes of slot i of the turn may have terms of their own, and which.
  __device__ __forceinline__ bool begins(int i) const { return i == 0 || slots() > 1; }
  __device__ __forceinline__ float2 at(int i) const { return {f_[i], c_[i]}; }

 private:
  static constexpr int kMost = S::kTurnK / kSlotK;
  const Params& params_;
  const char *const scale_, *const shift_;
  uint32_t scale_bits_[kMost] = {}, shift_bits_[kMost] = {};
  float f_[kMost] = {}, c_[kMost] = {};

  __device__ __forceinline__ int slots() const { return params_.groups.slots; }
  // use(i), for all slots of a turn.
  template <typename Use>
  __device__ __forceinline__ void each(Use&& use) {
    use(0);
    if (slots() == 1) return;
#pragma unroll
    for (int i = 1; i < kMost; ++i) use(i);
  }
  static __device__ __forceinline__ uint32_t bits_at(const char* row, int group,
                                                     const ScaleSource& source) {
    const char* const at = row + group * source.g_bytes;
    if (is_wide(source.dtype)) return load_bits(at, source.dtype, 0);
    return __ldg(reinterpret_cast<const uint8_t*>(at));
  }
  static __device__ __forceinline__ float number(uint32_t bits, Dtype dtype) {
    return is_wide(dtype) ? float_of_bits(bits, dtype) : float_of_byte(bits, dtype);
  }
};

// The codes of a stage, as words: of a row of the box, from byte `first` of it.
template <typename S>
__device__ __forceinline__ void load_codes(uint32_t row, uint32_t first, uint32_t swizzle,
                                           uint32_t (&words)[S::kStageRowBytes / 4]) {
  constexpr int kWords = S::kStageRowBytes / 4,
                kAtOnce = kWords % 4 == 0 ? 4 : (kWords % 2 == 0 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kWords; i += kAtOnce) {
    uint32_t byte = first + 4 * i;
    if (S::kRowBytes == 128) byte ^= swizzle;
    uint32_t some[kAtOnce];
    load_shared(row + byte, some);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) words[i + j] = some[j];
  }
}

// An octet of weights, rounded to what wgmma multiplies, into a row of operand A that has `swizzle`.
template <typename X>
__device__ __forceinline__ void store_octet(uint32_t row, int octet, uint32_t swizzle,
                                            const float (&w)[8]) {
  if constexpr (sizeof(X) == 2)
    store_shared16(row + (octet * 16 ^ swizzle),
                   {rounded_pair<X>(w[0], w[1]), rounded_pair<X>(w[2], w[3]),
                    rounded_pair<X>(w[4], w[5]), rounded_pair<X>(w[6], w[7])});
  else
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      store_shared16(row + ((octet * 32 + i * 4) ^ swizzle),
                     {to_tf32(w[i]), to_tf32(w[i + 1]), to_tf32(w[i + 2]), to_tf32(w[i + 3])});
}

// The turns of this warp.
template <typename S, typename X>
__device__ __forceinline__ void decode(const Params& params, const Work<S>& own, int tile,
                                       int first_stage, int stages, uint32_t shared,
                                       const float* table, const Barriers<S>& barriers) {
  using C = typename S::C;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - S::kConsumers, lane = threadIdx.x % 32;
  const int turns = own.turns(), turn = warp / own.warps(), step = turns * kTurnStages;
  const int box_bytes = own.box_bytes(), slots = own.slots();
  const int row_of_box = threadIdx.x % own.rows(), row = own.first() + row_of_box;
  const uint32_t swizzle = row % 8 * 16;
  RowTerms<S> row_terms(params, max(own.s, 0), min(tile * kTileRows + row, params.width - 1));
  row_terms.ask((first_stage + turn * kTurnStages) * S::kStageK);
  const uint32_t to_row = shared + row * 128;
  const uint32_t box_row = shared + S::kBoxes + row_of_box * S::kRowBytes;
  // The next turn: in which box, and where there; into which stages.
  int slot = turn / S::kBoxTurns, box_parity = 0, inside = turn % S::kBoxTurns;
  int at = turn * kTurnStages, parity = 1;
#pragma unroll 1
  for (int stage = turn * kTurnStages; stage < stages; stage += step) {
    row_terms.take();
    row_terms.ask((first_stage + stage + step) * S::kStageK);
    wait(barriers.came(slot), box_parity);
    float scale[4], shift = 0;
#pragma unroll
    for (int half = 0; half < kTurnStages; ++half) {
      if (half > 0 && stage + half >= stages) break;
      uint32_t words[S::kStageRowBytes / 4];
      load_codes<S>(box_row + slot * box_bytes, (inside * kTurnStages + half) * S::kStageRowBytes,
                    swizzle, words);
      wait(barriers.empty(at + half), parity);
#pragma unroll
      for (int o = 0; o < S::kStageK / 8; ++o) {
        const int slot_of_turn = (half * S::kStageK + o * 8) / kSlotK;
        if (o % 4 == 0 && row_terms.begins(slot_of_turn)) {
          const float2 terms = row_terms.at(slot_of_turn);
          shift = terms.y;
#pragma unroll
          for (int p = 0; p < 4; ++p) scale[p] = terms.x * C::worth(p);
        }
        const int word = S::kBits * o / 4, bit = 8 * (S::kBits * o % 4);
        const auto from = [&](int j) { return j < S::kStageRowBytes / 4 ? words[j] : 0u; };
        C q;
        q.set(__funnelshift_r(from(word), from(word + 1), bit),
              S::kBits > 4 ? __funnelshift_r(from(word + 1), from(word + 2), bit) : 0);
        float w[8];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const float2 pair = q.pair(p, table);
          w[C::code(p, 0)] = fmaf(scale[p], pair.x, shift);
          w[C::code(p, 1)] = fmaf(scale[p], pair.y, shift);
        }
        store_octet<X>(to_row + (at + half) * S::kStageBytes, o, swizzle, w);
      }
      fence_proxy();
      __syncwarp();
      if (lane == 0) arrive(barriers.full(at + half));
      if (S::kPairs && own.ctas > 1 && lane == 0) arrive(barriers.decoded(at + half));
    }
    at += step;
    if (at >= S::kStages) at -= S::kStages, parity ^= 1;
    inside += turns;
    if (inside >= S::kBoxTurns) {
      if (lane == 0) arrive(barriers.read(slot));
      slot += inside / S::kBoxTurns, inside %= S::kBoxTurns;
      if (slot >= slots) slot -= slots, box_parity ^= 1;
    }
  }
}

#endif

}  // namespace jaxgemv::cuda::gemm_tma
