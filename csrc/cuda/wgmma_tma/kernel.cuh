// Many rows of x on Hopper, where rows of the weights are whole 16 bytes and groups 32 codes and more, or 16 with
// scales of e4m3: wgmma with the weights from registers and the image of x from shared memory.
//
// A CTA has tiles of 64 rows of the weights, one for each of its groups of four warps, or some of them share K, or the
// last has none, where that gives more SMs work.
// One thread asks for boxes of the weights by tensor copies, one for records of x; a barrier tells when each is
// there, and when it has been used. Each warp brings the scales of its own rows.
//
// Memory answers in the order in which it is asked: the first boxes wait for the first of x.
#pragma once

#include "copies.cuh"
#include "gather.cuh"
#include "left_over.cuh"
#include "products.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a warp has to know: addresses in its CTA's shared memory, and its place in the CTA.
template <typename S>
struct Place {
  uint32_t x, scales;
  Barriers<S> barriers;
  int group, share, tile;  // tile: of 16 rows of the weights
  uint32_t words;          // address of this lane's first, in the first slot
};

// The sums of a warp over `units` units of K. kParts: how many of the decoder's parts may not be zero.
template <typename S, int kParts>
__device__ __forceinline__ void multiply(const Params& params, const Share& own, int units,
                                         const Place<S>& place, const Image& image, int box_rows,
                                         bool by_fours, bool ahead, Sums<S>& sums) {
  if (place.share >= units) return;
  constexpr bool kPerRow = S::kEnds == 0;
  constexpr int kCount = S::kColumns / 2;
  constexpr bool kOverlaps = !kPerRow && S::kAccumulators > 1 && S::kPieces > 1;
  constexpr int kInner = S::kInner;
  const Barriers<S> barriers{
      uniform(place.barriers.first)};  // else they are found anew for every box
  const uint32_t x_operand = operand_of<S>(place.x);
  const int lane = threadIdx.x % 32;
  const Turns<S> turns(params, by_fours);
  int unit = own.first_unit + turns.first(place.share);
  auto scales = [&] {
    if constexpr (S::kScalesNumbers)
      return OperandScales<S>(params, own, place.tile, unit);
    else if constexpr (kPerRow)
      return NoScales{};
    else
      return Scales<S>(params, own.s, place.tile, unit, by_fours, ahead, place.scales);
  }();
  scales.step(unit, true);
  // Bytes from a lane's first row to its second, which is 8 rows further on or, for a gated activation, its partner.
  const int second = (box_rows == S::kBoxRows ? 8 : box_rows) * S::kRowBytes;
  float dot[kOverlaps ? 2 : 1][kCount];
  int slot = 0, parity = 0, stage = place.share * S::kQuads, x_parity = 0;
  uint32_t last = barriers.spare();  // the empty barrier of the quad before
  uint32_t read = 0;  // of add_shifts, for a quad's last piece: a warp's loads arrive in order
  const auto done = [&](uint32_t empty, uint32_t has_come = 0) {
    __syncwarp();
    if (lane == 0 && has_come != ~0u) arrive(empty);
  };
  // Arriving would not wait for ordinary loads of the sums of x (docs/cuda-notes.md); looking at what they read does.
  const auto done_with_x = [&](uint32_t empty) { done(empty, read); };
#pragma unroll 1
  for (int i = place.share; i < units; i += params.deep) {
    const int at = place.group * S::kSlots + slot;
    Terms terms;
    wait(barriers.full(at), parity);
    // Begins the shifts of kInner pieces from `first` on, after a wait for their quads of x.
    const auto begin_shifts = [&](int first) {
      if constexpr (S::kSplitsSums) {
        constexpr int kPairs = (kInner + 1) / 2;
        uint32_t shifts[kPairs][4];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) scales.shifts(unit, first + 2 * i, shifts[i]);
#pragma unroll
        for (int p = 0; p < kInner; p += S::kQuadPieces)
          wait(barriers.x_full(stage + (first + p) / S::kQuadPieces), x_parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int p = first + 2 * i;
          sums.begin_shifts(place.x + (stage + p / S::kQuadPieces) * S::kRecordBytes,
                            p % S::kQuadPieces, shifts[i]);
        }
        wgmma_commit();
      }
    };
    // Where pieces do not overlap, registers are short: nothing of the next piece is to be loaded early.
#pragma unroll(kOverlaps ? S::kPieces / kInner : 1)
    for (int first = 0; first < S::kPieces; first += kInner) {
      if constexpr (!kPerRow && !kOverlaps) {
        if (first % 4 == 0) scales.reach(unit, first);
        begin_shifts(first);
      }
#pragma unroll(kOverlaps || S::kScalesNumbers || (S::kSplitsSums && kInner == 2) ? kInner : 1)
      for (int p = first; p < first + kInner; ++p) {
        const int q = p / S::kQuadPieces, of_quad = p % S::kQuadPieces;
        const bool ends_quad = of_quad == S::kQuadPieces - 1, ends_box = p == S::kPieces - 1;
        float (&now)[kCount] = dot[kOverlaps ? p % 2 : 0];
        float (&before)[kCount] = dot[kOverlaps ? (p + 1) % 2 : 0];
        const uint32_t record = place.x + (stage + q) * S::kRecordBytes,
                       operand = x_operand + (stage + q) * (S::kRecordBytes / 16);
        if (of_quad == 0) wait(barriers.x_full(stage + q), x_parity);
        const auto decode = [&](uint32_t low, uint32_t high, int row, int octet, int part,
                                uint32_t (&a)[4]) {
          if constexpr (S::kScalesNumbers)
            S::C::decode(low, scales.of(row, q, octet), a);
          else
            sums.decoder.decode(low, high, part, a);
        };
        const auto begin = [&]<bool kBefore>(bool adds) {
          sums.template begin<kBefore, kParts>(now, adds, place.words + slot * S::kBoxBytes, second,
                                               q, of_quad, operand, decode, [&] {
                                                 if (kOverlaps) wgmma_done(before);
                                                 if (of_quad == 0) done_with_x(last);
                                               });
          if (kPerRow || kOverlaps) last = barriers.x_empty(stage + q);
        };
        if constexpr (kPerRow) {
          begin.template operator()<true>(i > place.share || p > 0);
          if (ends_box) done(barriers.empty(at));
          continue;
        } else {
          if (kOverlaps && p > 0) {
            begin.template operator()<true>(false);
            sums.add(before, terms.f);
          } else {
            begin.template operator()<false>(false);
          }
          if (kOverlaps && p == first) scales.reach(unit, p), begin_shifts(p);
          terms = scales.terms(unit, p);
          if constexpr (S::kSums > 0 && !S::kSplitsSums)
            read = sums.add_shifts(record, of_quad, terms);
          if (kOverlaps && !ends_box) continue;
          if (ends_box && S::kMakesBeside) scales.step(turns.behind(unit), false);
          wgmma_wait<0>();
          wgmma_done(now);
          if (ends_quad) done_with_x(barriers.x_empty(stage + q));
          if (ends_box) done(barriers.empty(at));
          sums.add(now, terms.f);
        }
      }
    }
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
    stage += params.deep * S::kQuads;
    if (stage >= S::kXStages) stage -= S::kXStages, x_parity ^= 1;
    unit = turns.behind(unit);
    if (!kPerRow && !S::kMakesBeside) scales.step(unit, false);
  }
  if constexpr (kPerRow) {
    wgmma_wait<0>();
    wgmma_done(dot[0]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums.y[e] = dot[0][e];
  }
  if constexpr (S::kScalesNumbers)
    finish(params, own, image, place.tile, place.share, units, scales, sums.y);
}

#endif

// box_rows: rows of a box of weights: 64, or 32 of each half of a gated activation. by_fours: as Turns has it. ahead:
// as Scales has it. packs: whether rows of y are whole fours of results, as gather needs it. each: how gather shares
// out rows of x in a cluster.
template <Format kFormat, int kBits, int kColumns, int kEnds, InOperand kIn>
__global__ void __launch_bounds__(Shape<kFormat, kBits, kColumns, kEnds, kIn>::kThreads, 1)
    gemv_wgmma_tma(const Params params, const __grid_constant__ CUtensorMap weights, int box_rows,
                   bool by_fours, bool ahead, bool packs, RowsEach each) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kFormat, kBits, kColumns, kEnds, kIn>;
  using C = typename S::C;
  constexpr bool kPerRow = kEnds == 0;
  using Order = OrderOf<S::kHasPairs>;
  static_assert((!C::kHasShift || C::kWorth == Order::kWorth) &&
                C::code(1, 0) == Order::code(1, 0) && C::code(0, 1) == Order::code(0, 1) &&
                C::code(3, 1) == Order::code(3, 1));
  extern __shared__ __align__(1024) uint8_t base[];  // as the swizzle needs it
  __shared__ uint64_t barrier_words[Barriers<S>::kCount];
  __shared__ float factors[kColumns];  // of the norm: sums of squares
  __shared__ RowOfX rows[kColumns];
  const uint32_t shared = shared_address(base);
  const Barriers<S> barriers{shared_address(barrier_words)};
  const int warp = uniform(threadIdx.x / 32);
  const auto image_of = [&](const Share& own, int tile) {
    return Image(params, const_cast<uint8_t*>(params.image), blockIdx.y,
                 own.cluster - tile * params.m_tiles, params.units * S::kQuads, kColumns,
                 S::kRecordBytes);
  };
  // For a consumer thread: its group among those with rows of their own, its share of K, its warp's tile of 16 rows.
  const auto group_of = [&](int thread) { return thread / 128 >> params.log_deep(); };
  const auto share_of = [&](int thread) { return thread / 128 & (params.deep - 1); };
  const auto tile_of = [&](int thread) { return group_of(thread) * 4 + thread / 32 % 4; };
  Sums<S> sums(base + S::kTable);
  if (threadIdx.x == S::kConsumers) barriers.init_of_weights();
  if (threadIdx.x == S::kConsumers + 32) barriers.init_of_x(params.across);
  {
    const Share own(params);
    const int tile = Share::over(own.cluster, params.m_tiles);
    const int units = own.s < 0 ? 0 : own.last_unit - own.first_unit;
    const int group = warp / 4;
    const Turns<S> turns(params, by_fours);
    const int units_here = has_rows(params, group) ? units : 0;
    const Place<S> place{shared + S::kX,
                         shared + S::kScales + warp * S::kScaleBytes,
                         barriers,
                         group,
                         group & (params.deep - 1),
                         tile * params.across + (group >> params.log_deep()) * 4 + warp % 4,
                         shared + group * S::kSlots * S::kBoxBytes +
                             (warp % 4 << params.log_rows) * S::kRowBytes + first_word<S>()};
    // Loads that come before anything else: the answers take a microsecond.
    const uint32_t entry = C::ask_for_entry(params.codebook, max(own.s, 0));
    if constexpr (!kPerRow && !S::kScalesNumbers)
      if (place.share < units_here)
        Scales<S>(params, own.s, place.tile, own.first_unit + turns.first(place.share), by_fours,
                  ahead, place.scales)
            .ask_for_first();
    // Copies wait for no table, and weights for nobody.
    if (warp == S::kWarps || (S::kHasTable && warp > S::kWarps)) {
      if (S::kHasTable && warp <= S::kWarps + 1) sync_threads<2>(64);  // whose barriers both use
      arrive_threads(S::kThreads);
    } else {
      if constexpr (S::kHasTable)
        C::make_table(params.codebook, entry, base + S::kTable, params.x.lets_round(), S::kWarps);
      sync_threads(S::kThreads);
    }
    if (warp >= S::kWarps) {
      setmaxnreg_dec<32>();
      if (threadIdx.x == S::kConsumers) {
        copy_weights(params, own, tile, units, weights, box_rows, turns, shared, barriers);
      } else if (threadIdx.x == S::kConsumers + 32) {
        wait_for_earlier();  // also if own.s < 0: must not end before the one in front
        copy_x(image_of(own, tile), own.first_unit, units, turns, shared + S::kX,
               shared_address(rows), barriers);
      }
      return;
    }
    setmaxnreg_inc<112>();
    const auto multiply_by = [&]<int kParts>() {
      multiply<S, kParts>(params, own, units_here, place, image_of(own, tile), box_rows, by_fours,
                          ahead, sums);
    };
    if (C::kParts > 1 && sums.decoder.has_second())
      multiply_by.template operator()<C::kParts>();
    else
      multiply_by.template operator()<1>();
  }

  if (packs && params.ranks > 1) arrive_at_cluster();
  uint32_t thread;  // read again, so as not to be kept through the loop
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int mine = static_cast<int>(thread), t = mine % 4, row = row_of_lane<S>();
  const Share own(params);
  const int tile = Share::over(own.cluster, params.m_tiles);
  if (own.s >= 0) {
    wait(barriers.rows_full(), 0);
    const float unit = sums.decoder.unit();
    Terms terms{};
    if constexpr (kPerRow) {
      const bool has_sums = share_of(mine) == 0 && own.rank == 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = params.row_of(tile * params.across + tile_of(mine), row + 8 * r);
        const auto value = [&](const ScaleSource& source) {
          return number_at(source.row(own.s, n), source.dtype);
        };
        const float scale = value(params.scales[0]);
        terms.f[r] = scale;
        if (!C::kHasShift || !has_sums) continue;
        terms.c[r] = params.shift.of(scale, value(params.scales[1]));
      }
    }
#pragma unroll
    for (int p = 0; p < kColumns / 8; ++p)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * p + t * 2 + e;
        const RowOfX of = column < own.columns ? rows[column] : RowOfX{};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& y = sums.y[4 * p + 2 * r + e];
          if (kPerRow) y = fmaf(terms.f[r], y, terms.c[r] * of.sum);
          y *= of.power * unit;
        }
      }
    // Each CTA of a cluster has the squares of whole rows, and put_results adds those of all CTAs.
    if (params.x.norm.data != nullptr && mine < own.M)
      factors[mine] = packs || own.rank == 0 ? rows[mine * params.parts].squares : 0.f;
  }
  sync_threads(S::kConsumers);
  float* const partial = reinterpret_cast<float*>(base);
  const Placing<S> placing(params);
  const int at = placing.of(share_of(mine), t * 2, tile_of(mine) * kTileN + row);
  if (tile_of(mine) < params.across)
#pragma unroll
    for (int e = 0; e < kColumns / 2; ++e)
      partial[at + placing.of(0, e / 4 * 8 + e % 2, e / 2 % 2 * 8)] = sums.y[e];
  sync_threads(S::kConsumers);
  if (packs)
    gather<S>(params, own, tile, each, partial, factors, barriers.sent());
  else
    put_results<S>(params, own, tile, partial, factors, S::kWarps);
#endif
}

}  // namespace jaxgemv::cuda::wgmma_tma
