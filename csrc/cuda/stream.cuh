// The kernel for few rows of x: each warp streams its part of the weights through a ring of its own
// in shared memory, and keeps its part of x in registers for all the weights that its CTA meets.
//
// Work is cut three ways. A CTA computes a run of rows of the weights, in tiles of 16, of which the
// last begins 16 rows before the end and computes some rows again. A slice of K is a span of a row
// for each of its warps; the CTA goes through its tiles once for each slice. A span is a few
// blocks, each inside one group, so that scale and zero are two fp32 terms:
//   y += f * dot(q, x) + c * sum(x).
// What a warp adds to a row lies in a strip of shared memory of its own; in the end the strips of
// all warps are added in a fixed order.
//
// Memory answers in the order in which it is asked, and with 64 KB in flight an answer takes
// microseconds. So x is asked for before the first weights, and scales travel with the weights.
#pragma once

#include <cmath>

#include "span.cuh"

namespace jaxgemv::cuda {

namespace stream {

constexpr int kTileN = 16;
// Tiles in a warp's ring. More than two are no faster, and make whatever is not yet asked for wait
// longer (H200, int4, M = 1; 2, 3 and 4 tried, docs/kernel-notes.md).
constexpr int kStages = 2;

// How scale and shift lie: one for each row of the weights; or 16-bit ones for each group of a
// power of two of blocks, in pairs aligned to 4 bytes.
enum class Scales { kByRow, kByBlock };

// A warp's span of a row, and how many warps have registers enough for their x.
template <int kBits, int kRows, int kLaneWords>
struct Shape {
  // With 8-bit codes, 256 bytes are two groups of 128.
  static constexpr int kSpanBytes = kBits == 8 ? 256 : 128;
  // Of 64 K registers, by what the compiler makes of the kernel without spilling any.
  static constexpr bool kFewBlocks = kLaneWords > (kRows == 1 ? 1 : 2);
  static constexpr int kMaxWarps = kBits == 4                               ? (kFewBlocks ? 16 : 12)
                                   : kBits == 2 && kRows == 1 && kFewBlocks ? 12
                                                                            : 8;
};

// All that a CTA needs to know; what is needed first, first.
struct Job {
  const uint8_t* packed;
  const void* x;
  const int32_t* index;
  int rows_a_cta, more;  // the first `more` CTAs have one row more
  int m_tiles;           // CTAs next to each other that read the same weights
  int tiles;             // of each CTA
  int block_tiles;       // tiles whose strips fit into shared memory together
  int slices;
  int M, N, K, row_bytes;
  int group_log;  // kByBlock: a group is 2^this blocks
  int scale_row;  // kByBlock: bytes from row to row
  Affine affine;
  Dtype y_dtype;
  int stack;
  Param scale, shift;
  Index packed_stack_stride;
  void* y;
  Param bias;
};

// Copies a warp's spans of the weights, and the scales that go with them, tile after tile and slice
// after slice of a block of tiles. The halves of each 128 bytes of odd rows change places, so that
// the lanes that later read two rows at once find them in different banks.
template <Scales kScales, int kSpanBytes, int kBlocks>
struct Copier {
  static constexpr int kWeightBytes = kTileN * kSpanBytes;
  static constexpr int kScaleBytes = kScales == Scales::kByBlock ? kTileN * 4 * kBlocks : 0;
  static constexpr int kBytes = kWeightBytes + kScaleBytes;            // of a stage
  static constexpr int kLanes = kSpanBytes / 16, kRows = 32 / kLanes;  // of a copy of weights
  const Job& job;
  uint8_t* const ring;
  const int tiles, last_step;  // rows to the last tile
  const uint8_t* from;
  uint8_t* to;
  const char* scale_from;
  int left, slice = 0, offset, stage = 0;

  __device__ __forceinline__ Copier(const Job& job, int s, int first_row, int last_row, int tiles,
                                    uint8_t* ring)
      : job(job),
        ring(ring),
        tiles(tiles),
        last_step(last_row - first_row - (tiles - 2) * kTileN),
        left(tiles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / kLanes, piece = lane % kLanes;
    to = ring + row * kSpanBytes + (piece ^ (row % 2 * 4)) * 16;
    offset = warp * kSpanBytes + piece * 16;
    from = job.packed + ((first_row + row) * Index{job.row_bytes} + offset);
    if (job.index != nullptr) from += s * job.packed_stack_stride;
    if constexpr (kScales == Scales::kByBlock) {
      // In a span of a row, first the words of its scales, then those of its shifts.
      const int words_log = scale_words_log();
      const Param& param = lane >> words_log & 1 ? job.shift : job.scale;
      scale_from = static_cast<const char*>(param.data) + 2 * s * param.stack_stride;
      scale_from += (first_row + (lane >> (words_log + 1))) * job.scale_row + scale_word() * 4;
    }
  }

  // Starts the copy of the next tile. When kStages have been started, `stage` is the oldest.
  __device__ __forceinline__ void next() {
    if (slice < job.slices) {
      const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
      // Past the end of a row lies what was there before: codes, which meet x = 0.
      if (offset < job.row_bytes)
#pragma unroll
        for (int i = 0; i < kTileN / kRows; ++i)
          copy16(to + stage + i * kRows * kSpanBytes, from + i * (kRows * Index{job.row_bytes}));
      const int step = left == 2 ? last_step : kTileN;
      from += step * job.row_bytes;
      if constexpr (kScales == Scales::kByBlock) {
        const bool inside = scale_word() * 4 < job.scale_row;
        const int words_log = scale_words_log();
#pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i)
          if (i < 1 << words_log) {
            uint8_t* const word = ring + stage + kWeightBytes + (lane + 32 * i) * 4;
            // Past the last group a scale must be finite, because 0 times NaN is NaN.
            if (inside)
              copy4(word, scale_from + i * (kTileN >> words_log) * job.scale_row);
            else
              *reinterpret_cast<uint32_t*>(word) = 0;
          }
        scale_from += step * job.scale_row;
      }
      if (--left == 0) {  // back to the first tile, one slice further
        const int rows = last_step + (tiles - 1) * kTileN;
        ++slice, left = tiles, offset += warps * kSpanBytes;
        from += warps * kSpanBytes - rows * Index{job.row_bytes};
        scale_from += (warps << scale_words_log()) * 4 - rows * job.scale_row;
      }
    }
    stage = stage == (kStages - 1) * kBytes ? 0 : stage + kBytes;
    commit_copies();
  }

 private:
  // log2 of the words of scales in a row's span.
  __device__ __forceinline__ int scale_words_log() const {
    return (kBlocks == 16 ? 3 : kBlocks / 4) - job.group_log;
  }

  // The word that this lane copies of each row of scales.
  __device__ __forceinline__ int scale_word() const {
    const int log = scale_words_log(), span = slice * (blockDim.x / 32) + threadIdx.x / 32;
    return (span << log) + (threadIdx.x & ((1 << log) - 1));
  }
};

// The terms of a group. Codes are read as q * 2^-24: `f` makes up for it.
template <int kBits>
__device__ __forceinline__ float2 term_of(Affine affine, float scale, float shift) {
  const float zero = affine == Affine::kZero ? shift : mid_code(kBits);
  return {scale * 0x1p24f, affine == Affine::kOffset ? shift : -scale * zero};
}

// Shared memory of a warp: its ring, the terms of a tile, room for a row of x.
template <int kBits, Scales kScales, int kSpanBytes, int kBlocks>
struct Layout {
  static constexpr int kTerms = kStages * Copier<kScales, kSpanBytes, kBlocks>::kBytes;
  static constexpr int kX = kTerms + (kScales == Scales::kByBlock ? kTileN * kBlocks * 8 : 0);
  static constexpr int kBytes = kX + kSpanBytes * 16 / kBits;
};

// The terms of a tile from its copied scales: lane l makes those of the (row, block) pairs l, l +
// 32 and so on.
template <int kBits, int kBlocks>
__device__ __forceinline__ void make_terms(const Job& job, const uint8_t* scales, float2* terms) {
  const int lane = threadIdx.x % 32;
  const int row_bytes = kBlocks * 4 >> job.group_log;  // of scales and shifts together
#pragma unroll
  for (int i = 0; i < kTileN * kBlocks / 32; ++i) {
    const int row = lane / kBlocks + 32 / kBlocks * i, group = lane % kBlocks >> job.group_log;
    const auto at = reinterpret_cast<const unsigned short*>(scales + row * row_bytes) + group;
    terms[lane + 32 * i] = term_of<kBits>(job.affine, float_of_bits(at[0], job.scale.dtype),
                                          float_of_bits(at[row_bytes / 4], job.shift.dtype));
  }
}

// A tile times a span of x: y[0], y[1] are row g, columns 2 t, 2 t + 1 of the product, in units of
// xs.power, y[2] and y[3] row g + 8. With one scale a row they still lack the row's term.
template <int kBits, Scales kScales, int kSpanBytes, int kLaneWords, int kRows, typename Span>
__device__ __forceinline__ void multiply(const uint8_t* weights, const float2* terms,
                                         const Span& xs, float (&y)[4]) {
  using W = Word<kBits>;
  constexpr int kBlocks = Span::kBlocks;
  constexpr int kStep = kRows == 1 ? 2 : 1;  // one row of x has no use for odd columns
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float chain[2][4] = {};  // two, because an mma waits for the one before it
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    uint32_t w[2][kLaneWords];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_shared<kLaneWords>(
          w[r], weights + (g + 8 * r) * kSpanBytes + ((i * 4 + t) * 4 * kLaneWords ^ g % 2 * 64));
    float dot[4] = {};
#pragma unroll
    for (int j = 0; j < kLaneWords; ++j)
#pragma unroll
      for (int step = 0; step < W::kSteps; ++step)
        mma_m16n8k16<__half>(kScales == Scales::kByBlock ? dot : chain[(j + step) % 2],
                             W::weights(w[0][j], step, 0), W::weights(w[1][j], step, 0),
                             W::weights(w[0][j], step, 1), W::weights(w[1][j], step, 1),
                             xs.b[i][j][step]);
    if constexpr (kScales == Scales::kByBlock) {
      if (i == 0) __syncwarp();  // for the terms, as late as possible
      const float2 term[2] = {terms[g * kBlocks + i], terms[(g + 8) * kBlocks + i]};
#pragma unroll
      for (int e = 0; e < 4; e += kStep)
        y[e] = fmaf(term[e / 2].x, dot[e], fmaf(term[e / 2].y, xs.sum[i][e % 2], y[e]));
    }
  }
  if constexpr (kScales == Scales::kByRow)
#pragma unroll
    for (int e = 0; e < 4; e += kStep) y[e] = chain[0][e] + chain[1][e];
}

// kMTiles: the rows of x may be more than kRows.
template <int kBits, typename X, int kRows, bool kMTiles, Scales kScales, int kLaneWords>
__global__ void __launch_bounds__(Shape<kBits, kRows, kLaneWords>::kMaxWarps * 32, 1)
    gemv_stream(const Job job) {
  constexpr int kSpanBytes = Shape<kBits, kRows, kLaneWords>::kSpanBytes;
  using Span = SpanX<kBits, X, kRows, kSpanBytes, kLaneWords>;
  constexpr int kBlocks = Span::kBlocks, kSpanK = Span::kSpanK;
  using Copies = Copier<kScales, kSpanBytes, kBlocks>;
  using Place = Layout<kBits, kScales, kSpanBytes, kBlocks>;
  constexpr bool kByBlock = kScales == Scales::kByBlock;
  extern __shared__ __align__(128) uint8_t shared[];

  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int cta = kMTiles ? blockIdx.x / job.m_tiles : blockIdx.x;
  const int m0 = kMTiles ? (blockIdx.x - cta * job.m_tiles) * kRows : 0;
  const int M = kRows == 1 ? 1 : kMTiles ? min(job.M - m0, kRows) : job.M;  // rows of x of this CTA
  const int first_row = cta * job.rows_a_cta + min(cta, job.more);
  const int last_tile = first_row + job.rows_a_cta + (cta < job.more) - kTileN;  // its first row
  int s = 0;
  if (job.index != nullptr) {
    s = job.index[blockIdx.y];
    if (s < 0 || s >= job.stack) s = -1;
  }
  const Index row0 = Index{static_cast<int>(blockIdx.y)} * job.M + m0;
  Span xs;
  const auto ask = [&](int slice) {
    xs.ask(static_cast<const X*>(job.x) + row0 * job.K, M, job.K, (slice * warps + warp) * kSpanK);
  };
  if (s >= 0) ask(0);

  uint8_t* const ring = shared + warp * Place::kBytes;
  float2* const terms = reinterpret_cast<float2*>(ring + Place::kTerms);
  uint32_t* const buffer = reinterpret_cast<uint32_t*>(ring + Place::kX);
  // A strip has a column for each two rows of x; behind the rows of the weights lies sum(x).
  float2* const strips = reinterpret_cast<float2*>(shared + warps * Place::kBytes);
  const int columns = (M + 1) / 2, sum_row = job.block_tiles * kTileN, column_size = sum_row + 4;
  const int strip = columns * column_size;

  for (int block = 0; block < job.tiles; block += job.block_tiles) {
    const int tiles = min(job.block_tiles, job.tiles - block);
    const auto row_of = [&](int tile) {
      return min(first_row + (block + tile) * kTileN, last_tile);
    };
    const auto row_term = [&](int n) {
      return term_of<kBits>(job.affine, load(job.scale, s, n, 0), load(job.shift, s, n, 0));
    };
    // At the end, 16 threads finish a tile for two rows of x: this is the first tile of theirs.
    const int first_i = threadIdx.x / 16;
    float2 term{};
    if (s >= 0) {
      if (!kByBlock && first_i < tiles * columns)
        term = row_term(row_of(first_i / columns) + lane % 16);
      Copies copier(job, s, row_of(0), row_of(tiles - 1), tiles, ring);
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) copier.next();
      for (int slice = 0; slice < job.slices; ++slice) {
        if (job.slices > 1 || block == 0) {
          // 2-bit codes leave no registers to ask early.
          if (kBits == 2 && (slice > 0 || block > 0)) ask(slice);
          xs.take(M, buffer);
          const int next = slice + 1 < job.slices ? slice + 1 : 0;
          if (kBits != 2 && job.slices > 1 && (next > 0 || block + tiles < job.tiles)) ask(next);
        }
        float2* to = strips + (warp * strip + t * column_size + g);
        const auto add = [&](float2& to, float2 v) {
          v.x *= xs.power[0], v.y *= xs.power[1];
          if (slice > 0) v.x += to.x, v.y += to.y;
          to = v;
        };
        if (!kByBlock && g == 0 && 2 * t < M) {
          float2 sum{};
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) sum.x += xs.sum[i][0], sum.y += xs.sum[i][1];
          add(to[sum_row], sum);
        }
        for (int tile = 0; tile < tiles; ++tile, to += kTileN) {
          copier.next();
          wait_copies<kStages - 1>();
          __syncwarp();
          const uint8_t* const weights = ring + copier.stage;
          if constexpr (kByBlock)
            make_terms<kBits, kBlocks>(job, weights + Copies::kWeightBytes, terms);
          float y[4] = {};
          multiply<kBits, kScales, kSpanBytes, kLaneWords, kRows>(weights, terms, xs, y);
          __syncwarp();
          if (2 * t < M) add(to[0], {y[0], y[1]}), add(to[8], {y[2], y[3]});
        }
      }
    }

    __syncthreads();
    for (int i = first_i; i < tiles * columns; i += warps * 2) {
      const int tile = columns == 1 ? i : i / columns, column = i - tile * columns;
      const int n = row_of(tile) + lane % 16;
      const float2* from = strips + column * column_size;
      float2 sum{}, sum_x{};
#pragma unroll 4
      for (int w = 0; w < warps; ++w, from += strip) {
        const float2 v = from[tile * kTileN + lane % 16];
        sum.x += v.x, sum.y += v.y;
        if constexpr (!kByBlock) sum_x.x += from[sum_row].x, sum_x.y += from[sum_row].y;
      }
      if (!kByBlock && s >= 0) {
        if (i > first_i) term = row_term(n);
        sum = {term.x * sum.x + term.y * sum_x.x, term.x * sum.y + term.y * sum_x.y};
      }
      const float bias = s < 0 ? NAN : job.bias.data != nullptr ? load(job.bias, s, n, 0) : 0.f;
      const Index at = (row0 + 2 * column) * job.N + n;
      store(job.y, job.y_dtype, at, sum.x + bias);
      if (2 * column + 1 < M) store(job.y, job.y_dtype, at + job.N, sum.y + bias);
    }
    if (block + tiles < job.tiles) __syncthreads();
  }
}

}  // namespace stream

}  // namespace jaxgemv::cuda
