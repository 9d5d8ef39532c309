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
  static constexpr int kMaxWarps = kBits == 8 || !kFewBlocks && kRows > 8   ? 8
                                   : kBits == 4 && kRows <= 8               ? (kFewBlocks ? 16 : 12)
                                   : kBits == 4 || kRows == 1 && kFewBlocks ? 12
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
  uint32_t stack;
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

  __device__ __forceinline__ Copier(const Job& job, uint32_t s, int first_row, int last_row,
                                    int tiles, uint8_t* ring)
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
    from += s * job.packed_stack_stride;
    if constexpr (kScales == Scales::kByBlock) {
      // In a span of a row, first the words of its scales, then those of its shifts.
      const int words_log = scale_words_log();
      const Param& param = lane >> words_log & 1 ? job.shift : job.scale;
      scale_from = static_cast<const char*>(param.data) + 2 * param.stack_stride * s;
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
      const int rows = left == 2 ? last_step : kTileN;
      from += rows * job.row_bytes;
      if constexpr (kScales == Scales::kByBlock) {
        // Past the last group a scale must be finite, because 0 times NaN is NaN.
        const bool inside = scale_word() * 4 < job.scale_row;
        const int words_log = scale_words_log();
#pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i)
          if (i < 1 << words_log)
            copy_or_zeros<4>(ring + stage + kWeightBytes + (lane + 32 * i) * 4,
                             scale_from + i * (kTileN >> words_log) * job.scale_row, inside);
        scale_from += rows * job.scale_row;
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

// Shared memory of a warp: its ring, the terms of a tile. Behind those of all warps lies what is
// staged of x, and then the strips.
template <int kBits, Scales kScales, int kSpanBytes, int kBlocks>
struct Layout {
  static constexpr int kTerms = kStages * Copier<kScales, kSpanBytes, kBlocks>::kBytes;
  static constexpr int kBytes = kTerms + (kScales == Scales::kByBlock ? kTileN * kBlocks * 8 : 0);
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

// A tile times a span of x: of column tile c, y[c][0] and y[c][1] are row g, columns 2 t, 2 t + 1
// of the product, in units of xs.power, y[c][2] and y[c][3] row g + 8. With one scale a row they
// still lack the row's term.
template <int kBits, Scales kScales, int kSpanBytes, int kLaneWords, int kRows, typename Span>
__device__ __forceinline__ void multiply(const uint8_t* weights, const float2* terms,
                                         const Span& xs, float (&y)[Span::kColumnTiles][4]) {
  using W = Word<kBits>;
  constexpr int kBlocks = Span::kBlocks, kColumnTiles = Span::kColumnTiles;
  constexpr int kStep = kRows == 1 ? 2 : 1;  // one row of x has no use for odd columns
  // Accumulators: one for each step of a word, or two that take turns, because an mma waits for the
  // one before it.
  constexpr float kWorth = Span::kScaled ? 1 : 1 / W::place((W::kSteps - 1) % 2);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float dot[kColumnTiles][2][4] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    uint32_t w[2][kLaneWords];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_shared<kLaneWords>(
          w[r], weights + (g + 8 * r) * kSpanBytes + ((i * 4 + t) * 4 * kLaneWords ^ g % 2 * 64));
#pragma unroll
    for (int j = 0; j < kLaneWords; ++j)
#pragma unroll
      for (int step = 0; step < W::kSteps; ++step)
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c)
          mma_m16n8k16<__half>(dot[c][(j * W::kSteps + step) % 2], W::weights(w[0][j], step, 0),
                               W::weights(w[1][j], step, 0), W::weights(w[0][j], step, 1),
                               W::weights(w[1][j], step, 1), xs.b[c][i][j][step]);
    if constexpr (kScales == Scales::kByBlock) {
      if (i == 0) __syncwarp();  // for the terms, as late as possible
      const float2 term[2] = {terms[g * kBlocks + i], terms[(g + 8) * kBlocks + i]};
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; e += kStep) {
          const float sum = fmaf(kWorth, dot[c][1][e], dot[c][0][e]);
          y[c][e] = fmaf(term[e / 2].x, sum, fmaf(term[e / 2].y, xs.sum[c][i][e % 2], y[c][e]));
          dot[c][0][e] = dot[c][1][e] = 0;
        }
    }
  }
  if constexpr (kScales == Scales::kByRow)
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int e = 0; e < 4; e += kStep) y[c][e] = fmaf(kWorth, dot[c][1][e], dot[c][0][e]);
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
  const int x_bytes = M * Span::kRowBytes;
  uint8_t* const x_place = shared + warps * Place::kBytes;
  uint8_t* const x = x_place + warp * x_bytes;
  const auto ask = [&](int slice) {
    // Read again: nothing of this is kept through the loops, where registers are few.
    uint32_t thread, y;
    asm volatile("mov.u32 %0, %%tid.x;\nmov.u32 %1, %%ctaid.y;" : "=r"(thread), "=r"(y));
    const int first = (slice * warps + static_cast<int>(thread / 32)) * kSpanK;
    Span::ask(static_cast<const X*>(job.x) + (Index{y} * job.M + m0) * job.K, M, job.K, first,
              shared + warps * Place::kBytes + thread / 32 * x_bytes);
  };
  ask(0);
  commit_copies();
  // The matrix of the stack; a negative index is a large one.
  uint32_t s = 0;
  if (job.index != nullptr) s = static_cast<uint32_t>(job.index[blockIdx.y]);
  const bool exists = s < job.stack;

  uint8_t* const ring = shared + warp * Place::kBytes;
  float2* const terms = reinterpret_cast<float2*>(ring + Place::kTerms);
  // A strip has a column for each two rows of x; behind the rows of the weights lies sum(x).
  float2* const strips = reinterpret_cast<float2*>(x_place + warps * x_bytes);
  const int columns = (M + 1) / 2, sum_row = job.block_tiles * kTileN, column_size = sum_row + 4;
  const int strip = columns * column_size;
  Span xs;

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
    if (exists) {
      if (!kByBlock && first_i < tiles * columns)
        term = row_term(row_of(first_i / columns) + lane % 16);
      Copies copier(job, s, row_of(0), row_of(tiles - 1), tiles, ring);
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) copier.next();
      for (int slice = 0; slice < job.slices; ++slice) {
        if (job.slices > 1 || block == 0) {
          // It came with the first tile of the slice before.
          if (tiles < kStages)
            wait_copies<0>();
          else
            wait_copies<kStages - 1>();
          __syncwarp();
          xs.take(M, x);
          __syncwarp();
          const int next = slice + 1 < job.slices ? slice + 1 : 0;
          if (job.slices > 1 && (next > 0 || block + tiles < job.tiles)) ask(next);
        }
        float2* to = strips + (warp * strip + t * column_size + g);
        const auto add = [&](int c, float2& to, float2 v) {
          if constexpr (Span::kScaled) v.x *= xs.power[c][0], v.y *= xs.power[c][1];
          if (slice > 0) v.x += to.x, v.y += to.y;
          to = v;
        };
        const auto for_columns = [&](auto&& run) {
#pragma unroll
          for (int c = 0; c < Span::kColumnTiles; ++c)
            if (8 * c + 2 * t < M) run(c, to + 4 * c * column_size);
        };
        if (!kByBlock && g == 0)
          for_columns([&](int c, float2* to) {
            float2 sum{};
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) sum.x += xs.sum[c][i][0], sum.y += xs.sum[c][i][1];
            add(c, to[sum_row], sum);
          });
        for (int tile = 0; tile < tiles; ++tile, to += kTileN) {
          copier.next();
          wait_copies<kStages - 1>();
          __syncwarp();
          const uint8_t* const weights = ring + copier.stage;
          if constexpr (kByBlock)
            make_terms<kBits, kBlocks>(job, weights + Copies::kWeightBytes, terms);
          float y[Span::kColumnTiles][4] = {};
          multiply<kBits, kScales, kSpanBytes, kLaneWords, kRows>(weights, terms, xs, y);
          __syncwarp();
          for_columns([&](int c, float2* to) {
            add(c, to[0], {y[c][0], y[c][1]}), add(c, to[8], {y[c][2], y[c][3]});
          });
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
      if (!kByBlock && exists) {
        if (i > first_i) term = row_term(n);
        sum = {term.x * sum.x + term.y * sum_x.x, term.x * sum.y + term.y * sum_x.y};
      }
      const float bias = !exists ? NAN : job.bias.data != nullptr ? load(job.bias, s, n, 0) : 0.f;
      const Index at = (Index{blockIdx.y} * job.M + (m0 + 2 * column)) * job.N + n;
      store(job.y, job.y_dtype, at, sum.x + bias);
      if (2 * column + 1 < M) store(job.y, job.y_dtype, at + job.N, sum.y + bias);
    }
    if (block + tiles < job.tiles) __syncthreads();
  }
}

}  // namespace stream

}  // namespace jaxgemv::cuda
