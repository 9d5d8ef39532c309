// Parameters of the kernels with an image of x, and a CTA's share of the work.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/grid.cuh"
#include "scales.cuh"

namespace jaxgemv::cuda::image {

constexpr int kTileN = 16;  // rows of the weights

struct Params {
  const uint8_t* packed;
  Index packed_stack_stride;
  const uint8_t* image;  // of all rows of x; null where CTAs make their own
  XSource x;
  const int32_t* index;
  Param codebook;
  Groups groups;
  ScaleSource scales[2];  // and shifts
  ShiftTerm shift;
  int stack, M, row_bytes;
  int width, log_rows;         // of y; and log2 of its rows in a tile
  int rows_m, m_tiles, parts;  // rows of x of a CTA; such tiles of M; columns of a row
  int tiles, tile_stride;      // runs of across * kRows rows of the weights; a CTA's step
  int across, deep;            // warps with rows of their own; warps that share K of these
  int ranks;                   // CTAs of a cluster, which share K
  int units, slice_units;      // units of K; those with x in shared memory at a time
  int share_units, longer;     // units of a CTA; how many of a cluster have one more
  Windows windows;             // of scales
  bool aligned;                // every row of the weights, to 16 bytes
  bool plain;                  // no activation, no residual
  Output output;
  float eps;

  // Row i of a tile; rows past the end repeat the last one. A gated activation's tile has eight rows and the eight that
  // they are paired with.
  __device__ __forceinline__ int row_of(int tile, int i) const {
    const int mask = (1 << log_rows) - 1;
    return min((tile << log_rows) + (i & mask), width - 1) + (i > mask ? width : 0);
  }
  // log2 of `deep`, where it is a power of two, as in all kernels but mma_any.
  __device__ __forceinline__ int log_deep() const { return __popc(deep - 1); }
  __device__ __forceinline__ const uint8_t* row(int s, int n) const {
    return packed + s * packed_stack_stride + n * Index{row_bytes};
  }
};

// What a CTA has of the work: its units of K, and its rows of x.
struct Share {
  int cluster, rank, s;
  int first_unit, last_unit;
  int m0, M, columns;
  Index first_row;  // of x, in the batch

  __device__ __forceinline__ explicit Share(const Params& params)
      : Share(params, cluster_of_cta(), rank_of_cta()) {}
  __device__ __forceinline__ Share(const Params& params, int cluster, int rank)
      : cluster(cluster),
        rank(rank),
        s(stack_entry(params.index, params.stack, blockIdx.y)),
        first_unit(rank * params.share_units + min(rank, params.longer)),
        last_unit(first_unit + params.share_units + (rank < params.longer)),
        m0((cluster - over(cluster, params.m_tiles) * params.m_tiles) * params.rows_m),
        M(min(params.M - m0, params.rows_m)),
        columns(M * params.parts),
        first_row(Index{blockIdx.y} * params.M + m0) {}

  // A division takes as long as a load, and most are by one.
  static __device__ __forceinline__ int over(int a, int b) { return b == 1 ? a : a / b; }
};

// Makes the records of `quads` quads, from `first` on, of a CTA's rows of x, by `threads` threads: whole warps.
// when_asked() is called once, when the first loads of x have been issued.
template <typename C, typename WhenAsked>
__device__ __forceinline__ void make_records(const Params& params, const Share& own, uint8_t* image,
                                             int first, int quads, int threads,
                                             WhenAsked&& when_asked) {
  const int tasks = quads * own.M;
  const NormValues norm(params.x.norm, own.s, 0);
#pragma unroll 1
  for (int i = 0; i < tasks; i += threads / 16) {  // all lanes of a warp stay together
    const int task = min(i + static_cast<int>(threadIdx.x) / 16, tasks - 1);
    const int quad = task / own.M, m = task - quad * own.M;
    const int k = (first + quad) * kQuadK + static_cast<int>(threadIdx.x) % 16 * 8;
    float raw[8];
    load_octet_of_x(params.x, own.first_row + m, k, raw);
    if (i == 0) when_asked();
    put_quad<C>(raw, image + quad * (kRecordBytes * own.columns), m * params.parts, own.columns,
                params.parts, params.groups.slots, norm, k, params.x.K);
  }
}

}  // namespace jaxgemv::cuda::image
