// Many rows of x on Hopper: wgmma with the weights from registers and the image of x from shared
// memory.
//
// A CTA has tiles of 64 rows of the weights, one for each of its groups of four warps, or some of
// them share K. Each warp streams its 16 rows, quad by quad, through a ring of its own, as mma_any
// does; one more thread brings the records of x, which all share, or if there are few, the CTA makes
// them itself. The layout of a record, 16 bytes of each column side by side, is what wgmma wants of
// operand B.
#pragma once

#include "../image/results.cuh"
#include "products.cuh"

namespace jaxgemv::cuda::wgmma_any {

// Whether no other warp has a share in the sums of a warp, and nothing follows but a bias.
__device__ __forceinline__ bool are_complete(const Params& params) {
  return params.ranks * params.deep == 1 && params.plain && params.x.norm.data == nullptr &&
         params.output.global_scale.data == nullptr;
}

// Stores such sums from registers to y. tile: of 16 rows of the weights, of which this lane has g and g + 8; y[4 p + 2
// r + e] is that of row g + 8 r, column 8 p + 2 t + e.
template <typename S, int kCount>
__device__ __forceinline__ void put_sums(const Params& params, const Share& own, int tile,
                                         const float (&y)[kCount]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool pairs = params.parts == 2;  // both columns are of one row of x
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = tile * kTileN + lane / 4 + 8 * r;
    if (n >= params.width) return;
    const float bias = bias_of(params.output, own.s >= 0, own.s, n);
    const auto put = [&](int m, float sum) {
      if (m < own.M)
        store(params.output.y, params.output.dtype, (own.first_row + m) * params.width + n,
              sum * S::kWorth + bias);
    };
#pragma unroll
    for (int p = 0; p < kCount / 4; ++p) {
      const float first = y[4 * p + 2 * r], second = y[4 * p + 2 * r + 1];
      put(pairs ? 4 * p + t : 8 * p + 2 * t, pairs ? first + second : first);
      if (!pairs) put(8 * p + 2 * t + 1, second);
    }
  }
}

// kScaled: for scales of one byte and groups smaller than a quad.
template <Format kFormat, int kBits, int kColumns, bool kScaled>
__global__ void __launch_bounds__(Shape<kFormat, kBits, kColumns>::kThreads, 1)
    gemv_wgmma_any(const Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kFormat, kBits, kColumns>;
  using C = Decoder<kFormat, kBits>;
  extern __shared__ __align__(128) uint8_t table[];
  uint8_t* const shared = table + C::kTableBytes;
  __shared__ float factors[kColumns];  // of the norm: sums of squares
  __shared__ uint64_t barriers[2 * S::kXStages];
  const uint32_t full = shared_address(barriers), empty = full + 8 * S::kXStages;
  const int lane = threadIdx.x % 32;
  const int warp = uniform(threadIdx.x / 32);
  const bool makes = params.image == nullptr;  // few quads: no more than there are stages
  if (makes) wait_for_earlier();
  const Share own(params);
  const int tile = own.cluster / params.m_tiles, record_bytes = own.columns * kRecordBytes;
  const int units = own.s < 0 ? 0 : own.last_unit - own.first_unit, quads = units * S::kQuads;
  const int ring_bytes = S::bytes(params.windows.pieces);
  uint8_t* const x = shared + S::kWarps * ring_bytes;
  const uint8_t* const image =
      makes ? x
            : params.image +
                  own.first_row * params.parts * (params.units * Index{S::kQuads * kRecordBytes}) +
                  own.first_unit * static_cast<Index>(S::kQuads * record_bytes);
  // The warps of a group have neighbouring rows and the same share of K.
  const int group = warp / 4, share = group & (params.deep - 1);
  const int place = (group >> params.log_deep()) * 4 + warp % 4;

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kXStages; ++i)
      init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, params.across);
    fence_barrier_init();
  }
  if (own.s >= 0)
    C::make_table(params.codebook, C::ask_for_entry(params.codebook, own.s), table,
                  params.x.lets_round(), blockDim.x / 32);
  __syncthreads();
  if (warp >= S::kWarps) {
    setmaxnreg_dec<S::kRegistersOfCopies>();
    if (threadIdx.x == S::kConsumers && !makes) {
      wait_for_earlier();  // also if own.s < 0: this kernel must not end before the one in front
      for (int i = 0; i < quads; ++i) {
        const int stage = i % S::kXStages;
        if (i >= S::kXStages) wait(empty + 8 * stage, i / S::kXStages % 2 ^ 1);
        arrive_and_expect(full + 8 * stage, record_bytes);
        copy_bulk(shared_address(x) + stage * record_bytes, image + i * Index{record_bytes},
                  record_bytes, full + 8 * stage);
      }
    }
    return;
  }
  setmaxnreg_inc<S::kRegisters>();
  Sums<kFormat, kBits, kColumns, kScaled> sums(params, table);
  if (quads > 0) {
    uint8_t* const ring = shared + warp * ring_bytes;
    Weights<S> weights(params, own.s, tile, place, share, own.first_unit, own.last_unit, ring);
    const auto begin = [&] {
#pragma unroll 1
      for (int i = 0; i < S::kStages - 1; ++i) weights.next();
    };
    if (makes) {
      make_records<C>(params, own, x, own.first_unit * S::kQuads, quads, S::kConsumers, begin);
      fence_proxy();
      sync_threads(S::kConsumers);
    } else {
      begin();
    }
    const int of_warp = tile * params.across + place;
    int at[2];  // bytes from a stage to this lane's rows
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* const row = params.row(own.s, params.row_of(of_warp, lane / 4 + 8 * h));
      at[h] = kept((lane / 4 + 8 * h) * S::kPitch +
                   static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16));
    }
    int stage = share * S::kQuads, parity = 0;
    const uint32_t full_here = kept(full);
    Window<S> window(params, ring);
    int first_group = 0, inside = 0;
#pragma unroll 1
    for (int i = share; i < units; i += params.deep) {
      weights.next();
      wait_copies<S::kStages - 1>();
      __syncwarp();
      const uint32_t* const rows[2] = {reinterpret_cast<const uint32_t*>(weights.stage + at[0]),
                                       reinterpret_cast<const uint32_t*>(weights.stage + at[1])};
      if (window.opens(own.first_unit + i)) {
        first_group = window.first();
        inside = weights.scales()[0].inside(first_group);
      }
#pragma unroll 1
      for (int q = 0; q < S::kQuads; ++q) {
        const uint32_t barrier = full_here + 8 * (stage + q);
        if (!makes) wait(barrier, parity);
        sums.add(params, rows, q * 4 * kBits, weights.scales()[0], window.at, inside, first_group,
                 x + (stage + q) * record_bytes, own.columns,
                 ((own.first_unit + i) * S::kQuads + q) * kQuadK);
        __syncwarp();
        if (lane == 0) arrive(barrier + 8 * S::kXStages);
      }
      stage += params.deep * S::kQuads;
      if (stage >= S::kXStages) stage -= S::kXStages, parity ^= 1;
    }
  }

  if (quads > 0) sums.finish();
  if (are_complete(params)) return put_sums<S>(params, own, tile * params.across + place, sums.y);
  // The sums of squares over this CTA's share of K, for put_results.
  if (params.x.norm.data != nullptr)
    for (int m = warp; m < own.M; m += S::kWarps) {
      if (!makes) wait_for_earlier();
      float squares = 0;
      for (int i = lane; i < quads; i += 32)
        squares += reinterpret_cast<const float*>(
            image + i * Index{record_bytes} +
            own.columns * (kQuadK * 2))[m * params.parts * kMetaWords + kSquares];
      for (int i = 16; i > 0; i /= 2) squares += __shfl_xor_sync(~0u, squares, i);
      factors[m] = squares;
    }
  sync_threads(S::kConsumers);
  float* const partial = reinterpret_cast<float*>(shared);
  const Placing<S> placing(params);
#pragma unroll
  for (int e = 0; e < kColumns / 2; ++e)
    partial[placing.of(share, e / 4 * 8 + lane % 4 * 2 + e % 2,
                       place * kTileN + lane / 4 + e / 2 % 2 * 8)] = sums.y[e];
  sync_threads(S::kConsumers);
  put_results<S>(params, own, tile, partial, factors, S::kWarps);
#endif
}

}  // namespace jaxgemv::cuda::wgmma_any
