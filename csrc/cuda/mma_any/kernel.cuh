// The kernel for whatever the others refuse, on tensor cores: every width, dtype of x, and layout of
// rows and scales, for up to 64 columns of x.
//
// A CTA takes tiles of 16 rows of the weights; some of its warps have tiles of their own, and others
// share K with them. A warp streams its part unit by unit, some hundred codes of 16 rows, through a
// ring of its own in shared memory. Rows may begin at any word, so copies begin at the 16 bytes
// around it. Lane (g, t) = (lane / 4, lane % 4) takes octets t, t + 4 .. of rows g and g + 8: the A
// operand of mma.m16n8k16, in a permutation of k that the image of x follows (image.cuh). The affine
// part is two fp32 terms a group:
//   y += f * dot(q, x) + c * sum(x).
#pragma once

#include <cmath>

#include "sums.cuh"

namespace jaxgemv::cuda::mma_any {

template <int kBits, int kColumnTiles>
__global__ void __launch_bounds__(Shape<kBits, kColumnTiles>::kMaxWarps * 32, 1)
    gemv_mma_any(const Params params) {
  using S = Shape<kBits, kColumnTiles>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float factors[8 * kColumnTiles];  // of the norm: sums of squares
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be uniform
  // More warps than have weights to read copy x and finish sums.
  const int readers = params.across * params.deep;
  const bool reads = warp < readers;
  uint8_t* const ring = shared + warp * S::kStages * params.stage_bytes;
  float* const partial =
      reinterpret_cast<float*>(shared + (S::kMany ? 0 : readers * S::kStages * params.stage_bytes));
  uint8_t* const image =
      shared + readers * (S::kStages * params.stage_bytes + (S::kMany ? 0 : S::kSumsBytes));

  const int cluster = static_cast<int>(blockIdx.x) / params.ranks;
  const int rank = static_cast<int>(blockIdx.x) - cluster * params.ranks;
  const int first_unit = params.units * rank / params.ranks;
  const int last_unit = params.units * (rank + 1) / params.ranks;
  const int m0 = cluster % params.m_tiles * params.rows_m;
  const int M = min(params.M - m0, params.rows_m), columns = M * params.parts;
  const Index first_row = Index{blockIdx.y} * params.M + m0;
  const int s = stack_entry(params.index, params.stack, blockIdx.y);
  const int unit_record = S::kQuads * kRecordBytes * columns;
  const NormValues norm(params.x.norm, s, 0);

  // The image of some units, made here or copied. x is asked for before the first weights.
  const auto make_image = [&](int unit, int quads, auto&& when_asked) {
    const int tasks = quads * M, halves = blockDim.x / 16;  // M is 1 or 2
    const auto load_task = [&](int i, float (&raw)[8], int& quad, int& k) {
      quad = i >> (M - 1);
      k = (unit * S::kQuads + quad) * kQuadK + static_cast<int>(threadIdx.x) % 16 * 8;
      load_octet_of_x(params.x, first_row + (i & (M - 1)), k, raw);
    };
#pragma unroll 1
    for (int first = 0; first < tasks; first += halves) {  // all lanes of a warp stay together
      const int task = min(first + static_cast<int>(threadIdx.x) / 16, tasks - 1);
      float raw[8];
      int quad, k;
      load_task(task, raw, quad, k);
      when_asked(first);
      put_quad<kBits>(raw, image + quad * (kRecordBytes * columns), (task & (M - 1)) * params.parts,
                      columns, params.parts, params.groups.slots, norm, k, params.x.K);
    }
  };
  const uint8_t* const whole_image =
      params.image + first_row * params.parts * (params.units * S::kQuads * Index{kRecordBytes});
  const auto copy_image = [&](int unit, int count, uint8_t* to) {
    const uint8_t* const from = whole_image + unit * Index{unit_record};
    for (int i = threadIdx.x * 16; i < count * unit_record; i += blockDim.x * 16)
      copy16(to + i, from + i);
    commit_copies();
  };

  // Over the quads of a slice.
  const auto squares_of = [&](const uint8_t* records, int quads, int m) {
    float sum = 0;
    for (int quad = lane; quad < quads; quad += 32) {
      const uint8_t* const meta = records + columns * (quad * kRecordBytes + kQuadK * 2);
      sum += reinterpret_cast<const float*>(meta)[kSquares * columns + m * params.parts];
    }
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    return sum;
  };

  const bool copies = kColumnTiles > 1 || params.image != nullptr;
  const bool exists = s >= 0;
  const int first_tile = cluster / params.m_tiles;
  Weights<kBits, kColumnTiles> weights(params, max(s, 0), reads ? first_tile : params.tiles, warp,
                                       first_unit, last_unit, ring);
  const auto count_of = [&](int unit) { return min(params.slice_units, last_unit - unit); };
  const auto begin = [&] {
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) weights.next();
  };
  if (copies) {
    if (exists) begin();
    wait_for_first();  // also without a matrix: this kernel must not end before the first
    if (exists) copy_image(first_unit, count_of(first_unit), image);
  }
  const bool slices = params.slice_units < last_unit - first_unit;
  const int slice_bytes = params.slice_units * unit_record;
  int buffer = 0;

  for (int tile = first_tile; tile < params.tiles; tile += params.tile_stride) {
    Sums<kBits, kColumnTiles> sums;
    if (exists) {
      RowScale scales[S::kRowTiles];
      int shifts[S::kRowTiles][2];
      const int of_warp = (tile * params.across + warp / params.deep) * S::kRowTiles;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        scales[r] = RowScale(params.scales, s, params.row_of(of_warp + r, lane % 16));
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
          // It was asked for before the units of the slice before.
          const int since = is_first || !reads ? 0 : params.slice_units / params.deep;
          if (since == 0) wait_copies<0>();
          if (since == 1) wait_copies<1>();
          if (since == 2) wait_copies<2>();
          __syncthreads();
          if (kColumnTiles == 1 && !copies) {
            make_image(first, (last - first) * S::kQuads, [&](int i) {
              if (i == 0 && is_first && tile == first_tile) begin();
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
        for (int unit = first + warp % params.deep; reads && unit < last; unit += params.deep) {
          weights.next();
          wait_copies<S::kStages - 1>();
          __syncwarp();
          sums.add(params, weights.stage, scales, shifts, x + (unit - first) * unit_record, columns,
                   unit * S::kUnitK);
          __syncwarp();
        }
      }
    }

    if (S::kMany) __syncthreads();
    if (reads)
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            partial[(warp * S::kRows + r * kTileN + lane / 4 + 8 * (e / 2)) * S::kSumsPitch +
                    8 * c + lane % 4 * 2 + e % 2] = sums.y[r][c][e];
    __syncthreads();
    // The shares of K, and the columns of a row of x, added in a fixed order: those of this CTA, and in
    // a cluster then those of all, where the first of each lies.
    const int log_warp = params.log_rows + (S::kRowTiles > 1), results = params.across << log_warp;
    const auto place_of = [&](int i, int& m, int& row) {
      m = __umulhi(i, params.results_magic), row = i - m * results;
      const int of_warp = row & ((1 << log_warp) - 1);
      const int tile_row =
          of_warp >> params.log_rows << 4 | (of_warp & ((1 << params.log_rows) - 1));
      return partial + ((row >> log_warp) * params.deep * S::kRows + tile_row) * S::kSumsPitch +
             m * params.parts;
    };
    const auto sum_of_warps = [&](const float* from) {
      float sum = 0;
#pragma unroll 4
      for (int w = 0; w < params.deep; ++w, from += S::kRows * S::kSumsPitch)
        sum += params.parts == 2 ? from[0] + from[1] : from[0];
      return sum;
    };
    const bool gated = is_gated(params.output.activation);
    constexpr int kPair = 8 * S::kSumsPitch;  // from a row to the one it is paired with
    if (params.ranks > 1) {
#pragma unroll 1
      for (int i = threadIdx.x; i < results * M; i += blockDim.x) {
        int m, row;
        float* const at = place_of(i, m, row);
        *at = sum_of_warps(at);
        if (gated) at[kPair] = sum_of_warps(at + kPair);
      }
      sync_cluster();
    }
    const auto over_ranks = [&](const float* from) {
      float sum = 0;
#pragma unroll 1
      for (int r = 0; r < params.ranks; ++r) sum += load_of_rank(from, r);
      return sum;
    };
#pragma unroll 1
    for (int i = rank * blockDim.x + threadIdx.x; i < results * M; i += params.ranks * blockDim.x) {
      int m, row;
      const float* const from = place_of(i, m, row);
      const int n = tile * results + row;
      if (n >= params.width) continue;
      float factor = Octet<kBits>::kWorth;
      if (params.x.norm.data != nullptr)
        factor *= norm_factor(params.ranks > 1 ? over_ranks(factors + m) : factors[m], params.x.K,
                              params.eps);
      const auto result = [&](const float* from, int n) {
        const float sum = params.ranks > 1 ? over_ranks(from) : sum_of_warps(from);
        return sum * factor + bias_of(params.output, exists, s, n);
      };
      const float sum = result(from, n);
      const Index at = (first_row + m) * params.width + n;
      if (params.plain)
        store(params.output.y, params.output.dtype, at, sum);
      else
        finish<Parts::kNormAndEpilogue>(params.output, at, sum,
                                        gated ? result(from + kPair, n + params.width) : 1);
    }
    if (params.ranks > 1)
      sync_cluster();  // the others have read this CTA's sums
    else if (tile + params.tile_stride < params.tiles)
      __syncthreads();
  }
}

}  // namespace jaxgemv::cuda::mma_any
