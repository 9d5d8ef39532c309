// The kernel for whatever the others refuse, on tensor cores: every width, dtype of x, and layout of
// rows and scales, for up to 64 columns of x.
//
// A CTA takes tiles of 16 rows of the weights; some of its warps have tiles of their own, and others
// share K with them. A warp streams its part through a ring of its own in shared memory, unit by unit, which is
// some hundred codes of 16 rows. Rows may begin at any word, so copies begin at the 16-byte piece that
// contains it. Lane (g, t) = (lane / 4, lane % 4) takes octets t, t + 4 .. of rows g and g + 8, or four
// that follow one another: operand A of mma.m16n8k16, in a permutation of k that the image of x
// follows (image.cuh). The affine part is two fp32 terms a group:
//   y += f * dot(q, x) + c * sum(x).
#pragma once

#include <cmath>

#include "../image/results.cuh"
#include "sums.cuh"

namespace jaxgemv::cuda::mma_any {

template <Format kFormat, int kBits, int kColumnTiles>
__global__ void __launch_bounds__(Shape<Decoder<kFormat, kBits>, kColumnTiles>::kMaxWarps * 32, 1)
    gemv_mma_any(const Params params) {
  using C = Decoder<kFormat, kBits>;
  using S = Shape<C, kColumnTiles>;
  extern __shared__ __align__(128) uint8_t table[];
  uint8_t* const shared = table + C::kTableBytes;  // everything else lies behind the table
  __shared__ float factors[8 * kColumnTiles];      // sums of squares for the norm
  const bool copies = kColumnTiles > 1 || params.image != nullptr;
  if (!copies) wait_for_earlier();
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int warp = uniform(threadIdx.x / 32);
  // Warps beyond those that read weights help to copy x and to finish sums.
  const int readers = params.across * params.deep;
  const bool reads = warp < readers;
  const int ring_bytes = S::bytes(params.windows.pieces);
  uint8_t* const ring = shared + warp * ring_bytes;
  float* const partial = reinterpret_cast<float*>(shared + (S::kMany ? 0 : readers * ring_bytes));
  uint8_t* const image =
      shared + readers * ring_bytes + (S::kMany ? 0 : sums_bytes<S>(params.across, params.deep));

  const Share own(params);
  const int first_unit = own.first_unit, last_unit = own.last_unit, s = own.s;
  const int M = own.M, columns = own.columns;
  const Index first_row = own.first_row;
  const int unit_record = S::kQuads * kRecordBytes * columns;

  const uint8_t* const whole_image =
      params.image + first_row * params.parts * (params.units * S::kQuads * Index{kRecordBytes});
  const auto copy_image = [&](int unit, int count, uint8_t* to) {
    const uint8_t* const from = whole_image + unit * Index{unit_record};
    for (int i = threadIdx.x * 16; i < count * unit_record; i += blockDim.x * 16)
      copy16(to + i, from + i);
    commit_copies();
  };

  // The sum of squares of row m of x over the quads of a slice, by a whole warp.
  const auto squares_of = [&](const uint8_t* records, int quads, int m) {
    float sum = 0;
    for (int quad = lane; quad < quads; quad += 32) {
      const uint8_t* const meta = records + columns * (quad * kRecordBytes + kQuadK * 2);
      sum += reinterpret_cast<const float*>(meta)[m * params.parts * kMetaWords + kSquares];
    }
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    return sum;
  };

  const bool exists = s >= 0;
  const uint32_t entry = C::ask_for_entry(params.codebook, max(s, 0));
  const int first_tile = own.cluster / params.m_tiles;
  const int place = warp / params.deep, share = warp % params.deep;
  Weights<S> weights(params, max(s, 0), reads ? first_tile : params.tiles, place, share, first_unit,
                     last_unit, ring);
  const auto count_of = [&](int unit) { return min(params.slice_units, last_unit - unit); };
  const auto begin = [&] {
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) weights.next();
  };
  if (copies && exists) begin();
  if (exists) C::make_table(params.codebook, entry, table, params.x.lets_round(), blockDim.x / 32);
  if (copies) {
    wait_for_earlier();  // even without a matrix: this kernel must not end before the first
    if (exists) copy_image(first_unit, count_of(first_unit), image);
  }
  const bool slices = params.slice_units < last_unit - first_unit;
  const int slice_bytes = params.slice_units * unit_record;
  int buffer = 0;
  Window<S> window(params, ring);
  const Placing<S> placing(params);

  for (int tile = first_tile; tile < params.tiles; tile += params.tile_stride) {
    Sums<C, kColumnTiles> sums(table);
    if (exists) {
      window.restart();
      RowScale scales[S::kRowTiles];
      int shifts[S::kRowTiles][2];
      const int of_warp = (tile * params.across + place) * S::kRowTiles;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        // Where a CTA has no further tile, these are the scales that are being copied.
        scales[r] = S::kMany ? weights.scales()[r]
                             : RowScale(params.scales, s, params.row_of(of_warp + r, lane % 16));
#pragma unroll
        for (int h = 0; h < 2; ++h)
          shifts[r][h] = static_cast<int>(reinterpret_cast<uintptr_t>(params.row(
                                              s, params.row_of(of_warp + r, lane / 4 + 8 * h))) %
                                          16 / 4);
      }
      for (int first = first_unit; first < last_unit; first += params.slice_units) {
        const bool is_first = first == first_unit;
        const int last = first + count_of(first);
        const uint8_t* x = image + buffer * slice_bytes;
        if (slices || tile == first_tile) {
          // This slice of x was requested before the units of the previous slice.
          const int since = is_first || !reads ? 0 : params.slice_units / params.deep;
          if (since == 0) wait_copies<0>();
          if (since == 1) wait_copies<1>();
          if (since == 2) wait_copies<2>();
          __syncthreads();
          if (kColumnTiles == 1 && !copies) {
            make_records<C>(params, own, image, first * S::kQuads, (last - first) * S::kQuads,
                            blockDim.x, [&] {
                              if (is_first && tile == first_tile) begin();
                            });
            __syncthreads();
          }
          if (params.x.norm.data != nullptr && tile == first_tile)
            for (int m = warp; m < M; m += warps) {
              const float squares = squares_of(x, (last - first) * S::kQuads, m);
              const float total = is_first ? squares : factors[m] + squares;
              __syncwarp();
              factors[m] = total;
            }
          if (copies && slices) {
            buffer ^= 1;
            const int next = last < last_unit ? last : first_unit;
            if (next == last || tile + params.tile_stride < params.tiles)
              copy_image(next, count_of(next), image + buffer * slice_bytes);
          }
        }
        for (int unit = first + share; reads && unit < last; unit += params.deep) {
          weights.next();
          wait_copies<S::kStages - 1>();
          __syncwarp();
          window.opens(unit);
          sums.add(params, weights.stage, scales, window.at, window.first(), shifts,
                   x + (unit - first) * unit_record, columns, unit * S::kUnitK);
          __syncwarp();
        }
      }
    }

    if (S::kMany) __syncthreads();
    if (reads) {
      sums.finish();
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            partial[placing.of(share, 8 * c + lane % 4 * 2 + e % 2,
                               place * S::kRows + r * kTileN + lane / 4 + 8 * (e / 2))] =
                sums.y[r][c][e];
    }
    __syncthreads();
    put_results<S>(params, own, tile, partial, factors, warps);
    if (params.ranks == 1 && tile + params.tile_stride < params.tiles) __syncthreads();
  }
}

}  // namespace jaxgemv::cuda::mma_any
