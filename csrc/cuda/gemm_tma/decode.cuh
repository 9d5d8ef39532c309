// Weights, from codes to operand A in shared memory. A thread decodes a row.
#pragma once

#include "e2m1_row.cuh"
#include "rounded_row.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the codes of a stage, as words, from byte `first` of a row of the box on.
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

// Decodes in this warp's turns, in all tiles. row_of(n): row n of the weights, of which a thread decodes one per tile,
// as in rounded_row.cuh.
template <typename S, typename RowOf>
__device__ __forceinline__ void decode(const Params& params, const Work<S>& own, uint32_t shared,
                                       const Barriers<S>& barriers, RowOf&& row_of) {
  const int warp = uniform(threadIdx.x / 32) - S::kConsumers, lane = threadIdx.x % 32;
  const int turns = own.turns(), turn = warp / own.warps(), step = turns * kTurnStages;
  const int box_bytes = own.box_bytes(), slots = own.slots(), rounded = own.rounded();
  // The row of operand A is permuted so that eight lanes meet different banks there and in the box.
  const int i = static_cast<int>(threadIdx.x) % own.rows(), row = own.first() + (i ^ (i & 4) << 1);
  const int row_of_tile = row_of_operand(row), row_of_box = row_of_tile - own.first();
  const uint32_t swizzle = row % 8 * 16, box_swizzle = row_of_box % 8 * 16;
  const uint32_t to_row = shared + row * 128;
  const uint32_t box_row = shared + S::kBoxes + row_of_box * S::kRowBytes;
  // The next turn: in which box, and where there; into which stages.
  int slot = turn / S::kBoxTurns, box_parity = 0, inside = turn % S::kBoxTurns;
  int at = turn * kTurnStages, parity = 1;
  own.each_tile(params, [&](const Tile& tile) {
    auto weights = row_of(min(tile.number * kTileRows + row_of_tile, params.width - 1));
    weights.ask((own.first_stage + turn * kTurnStages) * S::kStageK);
#pragma unroll 1
    for (int stage = turn * kTurnStages; stage < rounded; stage += step) {
      weights.take((own.first_stage + stage) * S::kStageK);
      weights.ask((own.first_stage + stage + step) * S::kStageK);
      wait(barriers.came(slot), box_parity);
      constexpr int kUnrolled = decltype(weights)::kHasAlikeStages ? 1 : kTurnStages;
#pragma unroll kUnrolled
      for (int half = 0; half < kTurnStages; ++half) {
        uint32_t words[S::kStageRowBytes / 4];
        load_codes<S>(box_row + slot * box_bytes, (inside * kTurnStages + half) * S::kStageRowBytes,
                      box_swizzle, words);
        wait(barriers.empty(at + half), parity);
        if (stage + half < own.stages) {
#pragma unroll
          for (int o = 0; o < S::kStageK / 8; ++o) {
            const int word = S::kBits * o / 4, bit = 8 * (S::kBits * o % 4);
            const auto from = [&](int j) { return j < S::kStageRowBytes / 4 ? words[j] : 0u; };
            weights.put(half * (S::kStageK / 8) + o,
                        __funnelshift_r(from(word), from(word + 1), bit),
                        S::kBits > 4 ? __funnelshift_r(from(word + 1), from(word + 2), bit) : 0,
                        to_row + (at + half) * S::kStageBytes, swizzle);
          }
          fence_proxy();
        }
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
  });
}

#endif

}  // namespace jaxgemv::cuda::gemm_tma
