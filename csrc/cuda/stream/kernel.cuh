// The kernel for few rows of x: each warp streams its part of the weights through a ring buffer of its own
// in shared memory, and keeps its part of x in registers for all the weights that its CTA reads.
//
// Work is divided in three ways. A CTA computes a range of rows of the weights, in tiles of 16; the last tile
// begins 16 rows before the end, and computes some rows again. K is divided into slices, each a span of a row
// for every warp; the CTA goes through its tiles once for each slice. A span is a few
// blocks, each inside one group, so that scale and zero are two fp32 terms:
//   y += f * dot(q, x) + c * sum(x).
// A warp adds its results up as partial sums in shared memory of its own; in the end those of all
// warps are added in a fixed order.
//
// Memory answers requests in order, and with 64 KB in flight an answer takes
// microseconds. So x is requested before the first weights, and scales travel with the weights.
#pragma once

#include <cmath>

#include "../common/grid.cuh"
#include "span.cuh"

namespace jaxgemv::cuda {

namespace stream {

// kMTiles: x may have more than kRows rows. kByWords: a row of the weights may have any number of words, K may be
// anything, and the last tile may end one row behind the last row.
template <Format kFormat, int kBits, typename X, int kRows, bool kMTiles, Scales kScales,
          int kUnits, Parts kParts, bool kByWords>
__global__ void __launch_bounds__(
    SpanShape<kFormat, kBits, kRows, kScales, kUnits, kParts, kByWords>::kMaxWarps * 32, 1)
    gemv_stream(const Params params) {
  using Shape = SpanShape<kFormat, kBits, kRows, kScales, kUnits, kParts, kByWords>;
  constexpr int kSpanBytes = Shape::kSpanBytes;
  using Rows = SpanRows<kBits, kSpanBytes, kUnits>;
  constexpr bool kHasShift = kFormat == Format::kAffine;
  using Span = stream::Span<kFormat, kBits, X, kRows, kScales, kSpanBytes, kUnits, kParts>;
  constexpr int kStages = Shape::kStages;
  using Memory = WarpMemory<kFormat, kScales, Rows, kStages>;
  using Copies =
      Pipeline<kFormat, kScales, Rows, kParts, kStages, Shape::kMayBeginInWord, kByWords ? 4 : 16>;
  // Formats other than integers have a scale alone; what a table shifts by is part of x's sums.
  using Term = std::conditional_t<kHasShift, float2, float>;
  constexpr bool kByBlock = kScales != Scales::kByRow;
  constexpr bool kTermsEarly = !kByBlock && !Shape::kTwice;  // if registers allow
  constexpr bool kNormed = kParts == Parts::kNormAndEpilogue;
  constexpr bool kOneRow = Span::kRowsAColumn == 1;
  constexpr bool kBesideEarly = kHasShift || (kParts != Parts::kNone && kRows <= 2);    // likewise
  constexpr bool kResultEarly = kHasShift && kRows <= 2 && kScales != Scales::kByHalf;  // likewise
  // Asked for behind the second tile rather than before x: whatever makes x late makes that tile late too.
  constexpr bool kEarlyInLoop = kResultEarly && (kParts != Parts::kNone || kTermsEarly);
  constexpr bool kTakesResidual = takes_residual(kParts, kRows);
  constexpr bool kHasGlobalScale = !kHasShift && kParts != Parts::kNone;
  extern __shared__ __align__(128) uint8_t memory[];
  using Table = decltype(Span::codes);
  constexpr bool kHasTable = Table::kTableBytes > 0;
  uint8_t* const shared = memory + Table::kTableBytes;

  // From here on a team is treated as a CTA, except for where its warps' shared memory lies.
  using Team = stream::Team<kFormat, kScales>;
  unsigned uniform = 0;  // the warp's number, known to be uniform
  if constexpr (Team::kMayBeSeveral) uniform = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const auto of_cta = [&] { return Team::kMayBeSeveral ? uniform : threadIdx.x / 32; };
  const int number = Team::number(params, of_cta()), warps = Team::warps(params),
            warp = Team::place(params, of_cta()), lane = threadIdx.x % 32;
  const int all_warps = blockDim.x / 32, first_warp = number * warps;
  int cta = kMTiles ? blockIdx.x / params.m_tiles : blockIdx.x;
  const int m0 = kMTiles ? (blockIdx.x - cta * params.m_tiles) * kRows : 0;
  if (Team::kMayBeSeveral) cta = cta * params.teams + number;
  // Rows of x that this CTA computes.
  const int M = kRows == 1 ? 1 : kMTiles ? min(params.M - m0, kRows) : params.M;
  // One row of float32 x may be split into two parts, each of which is treated as a row until the end.
  const auto in_parts = [&] { return Span::is_in_parts(params.x_dtype); };
  // Whether an error of 2^-14 of the largest entry is too much for a table.
  const auto is_wide = [&] { return kNormed && params.x_dtype == Dtype::kF32; };
  const auto rows = [&] { return in_parts() ? 2 : M; };
  // How many partial sums a row of x has, which the end adds up to one.
  const auto parts = [&] { return Span::kHalves || in_parts() ? 2 : 1; };
  const Tiling<kParts> tiling{params};
  const int first_row = cta * params.rows_a_cta + min(cta, params.more) * params.unit;
  const int last_tile =  // its first row
      first_row + params.rows_a_cta + (cta < params.more ? params.unit : 0) - tiling.step();
  // x of the team, from its first warp on. (With several teams, partial sums lie there too.)
  uint8_t* const x_place = shared + all_warps * Memory::kBytes + first_warp * params.x_bytes;
  uint8_t* const x = x_place + warp * params.x_bytes;
  const auto ask = [&](int slice) {
    // The ids are read anew, so that nothing of this is kept in registers through the loops.
    uint32_t thread, y;
    asm volatile("mov.u32 %0, %%tid.x;\nmov.u32 %1, %%ctaid.y;" : "=r"(thread), "=r"(y));
    const int first =
        (slice * warps + static_cast<int>(Team::place(params, thread / 32))) * Span::kSpanK;
    Span::template ask<kByWords>(
        params.x, params.x_dtype, (Index{y} * params.M + m0) * params.K, M, params.K, first,
        shared + all_warps * Memory::kBytes + thread / 32 * params.x_bytes);
  };
  wait_for_earlier();
  ask(0);
  // The stack entry; as an unsigned number, a negative index is too large.
  uint32_t s = 0;
  if (params.index != nullptr) s = static_cast<uint32_t>(params.index[blockIdx.y]);
  const bool exists = s < params.stack;
  // The first k of this warp's span in a slice, and the norm from there on.
  const auto first_k = [&](int slice) { return (slice * warps + warp) * Span::kSpanK; };
  const StagedNorm norm{x + rows() * Span::kRowBytes, params.norm_dtype,
                        Span::kMayLackNorm && params.norm == nullptr};
  const auto ask_norm = [&](int slice) {
    if constexpr (kNormed) {
      const int first = (slice * warps + warp) * params.norm_bytes;
      norm.ask<4 * Span::kSpanK>(params.norm + (s * params.norm_stack_bytes + first),
                                 min(params.norm_bytes, params.norm_row_bytes - first));
    }
  };
  if (exists) ask_norm(0);
  commit_copies();
  // A table in shared memory is filled after the first weights have been asked for.
  uint32_t entry = 0;
  if constexpr (kHasTable)
    if (exists) entry = entry_bits(params.codebook, s);

  int ring_at = first_warp + warp;
  if constexpr (Team::kMayBeSeveral) ring_at = uniform;  // the same, with a register less
  uint8_t* const ring = shared + ring_at * Memory::kBytes;
  Term* const terms = reinterpret_cast<Term*>(ring + Memory::kTerms);
  // Partial sums have columns for all rows of x; behind the rows of the weights each column has sum(x) and,
  // with a norm, the sum of its squares.
  float2* const partials = reinterpret_cast<float2*>(x_place + params.partials);
  const int columns = ceil_div(M, Span::kRowsAColumn), sum_row = params.block_tiles * kTileN,
            column_size = sum_row + 4;
  const int partial_size = params.partial_bytes / 8;
  Span xs;
  if constexpr (!go_into_operand(kScales) && !kHasTable)
    if (exists) xs.codes = {params.codebook, s};

  for (int block = 0; block < params.tiles; block += params.block_tiles) {
    const int tiles = min(params.block_tiles, params.tiles - block);
    const auto row_of = [&](int tile) {
      return min(first_row + (block + tile) * tiling.step(), last_tile);
    };
    const auto row_term = [&](int n) {
      // Support for one-byte scales would make plain kernels longer, and int8 1.5% slower.
      const auto load_row = [&](const Param& p) {
        if constexpr (kParts == Parts::kNone && kHasShift) return load(p, s, n, 0);
        return load_scale(p, s, n, 0);
      };
      if constexpr (!kHasShift) {
        const float scale = load_row(params.scale);
        return float2{scale, scale};
      }
      return terms_of(params.affine, load_row(params.scale), load_row(params.shift),
                      mid_code(kBits));
    };
    // At the end 16 threads finish a column of a tile, and a warp a pair of columns: first_pair is the warp's first.
    const int all = tiles * columns, first_pair = 2 * warp;
    struct Result {
      int tile, column;
      int n;             // row of the weights
      int is_mine;       // not of a tile's second half, nor a row that another tile has finished
      Index at, second;  // where in y the column's rows of x go; `second` is `at` if there is one
    };
    const auto result_of = [&](int pair) {
      const int i = min(pair + lane / 16, all - 1);
      const int tile = kMTiles ? i / columns : i * params.of_columns >> kOfColumnsLog;
      const int column = i - tile * columns;
      const int first = row_of(tile);
      int n = first + lane % 16 + tiling.extra(lane % 16);
      int to = n, width = params.N;
      bool is_mine = pair + lane / 16 < all;
      if constexpr (kByWords) is_mine &= n < params.N, n = min(n, params.N - 1);
      if constexpr (kTakesResidual) {               // which may be y
        to = first + (lane & (tiling.step() - 1));  // a power of two
        is_mine &= to >= first_row + (block + tile) * tiling.step();
      }
      if (kParts != Parts::kNone && is_gated(params.output.activation))
        is_mine &= lane % 16 < 8, width /= 2;
      const int m = m0 + column * Span::kRowsAColumn;
      const Index at = (Index{blockIdx.y} * params.M + m) * width + to;
      const bool has_second = !kOneRow && m + 1 < m0 + M;
      return Result{tile, column, n, is_mine, at, has_second ? at + width : at};
    };
    // What the epilogue adds to the sums; the first values are asked for while the first weights are on their way.
    struct Beside {
      uint32_t bias, residual[2], scale;
    };
    const auto has_global_scale = [&] {
      return kHasGlobalScale &&
             (!go_into_operand(kScales) || !ScaledCodes::is_factor(params.output.global_scale));
    };
    const auto has_residual = [&] { return params.output.residual.data != nullptr; };
    const auto beside = [&](const Result& result) {
      Beside by{};
      if (exists) {
        by.bias = bias_bits(params.output, s, result.n);
        if (has_global_scale()) by.scale = global_scale_bits(params.output, s, result.n);
      }
      if constexpr (kTakesResidual)
        if (result.is_mine && has_residual()) {
          by.residual[0] = residual_bits(params.output, result.at);
          if constexpr (!kOneRow) by.residual[1] = residual_bits(params.output, result.second);
        }
      return by;
    };
    Result result{};
    Beside by{};
    float2 term{};
    const auto ask_early = [&] {
      if (first_pair >= all) return;
      const Result first = result_of(first_pair);
      if (kResultEarly) {  // kept, where the compiler would rather compute it anew
        result = first;
        asm volatile(""
                     : "+r"(result.tile), "+r"(result.column), "+r"(result.is_mine),
                       "+l"(result.at));
        if (!kOneRow) asm volatile("" : "+l"(result.second));
      }
      if (kTermsEarly && kEarlyInLoop && exists) term = row_term(first.n);
      if (kBesideEarly) by = beside(first);
    };
    if (exists) {
      if (kTermsEarly && !kEarlyInLoop && first_pair < all)
        term = row_term(result_of(first_pair).n);
      if constexpr (go_into_operand(kScales))
        xs.codes = {params.codebook, params.output.global_scale, s};
      Copies copies(params, s, row_of(0), row_of(tiles - 1), tiles, ring);
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) copies.next();
      if constexpr (kHasTable)
        if (block == 0) {
          xs.codes = {entry, params.codebook.dtype, memory, is_wide()};
          __syncthreads();
        }
      if (!kEarlyInLoop && kBesideEarly) ask_early();
      if (!kBesideEarly && kParts != Parts::kNone) touch(params.output);
      const int planes = is_wide() ? ScaledCodes::kMany : ScaledCodes::kFew;
      if constexpr (go_into_operand(kScales))
        xs.codes.settle(params.codebook.dtype, params.output.global_scale, planes);
      for (int slice = 0; slice < params.slices; ++slice) {
        // With a norm the compiler would compute what follows ahead of the first weights.
        const int own = kNormed ? kept(warp) : warp;
        const bool takes_x = params.slices > 1 || block == 0;
        float2 squares{};
        const auto add_squares = [&] {
          if constexpr (kNormed)
            xs.add_squares(partials + (own * partial_size + sum_row + 1), column_size, rows(),
                           slice > 0, squares);
        };
        if (takes_x) {
          // x came ahead of all weights, or with the first tile of the previous slice.
          wait_copies_but<kStages - 1>(slice == 0 ? kStages : tiles - 1);
          __syncwarp();
          uint8_t* const staged = x_place + own * params.x_bytes;
          StagedNorm of_span = norm;
          of_span.data = staged + rows() * Span::kRowBytes;
          squares = xs.take(rows(), params.x_dtype, staged, of_span, params.K - first_k(slice));
          __syncwarp();  // partial sums may lie where x was
          if (!kEarlyInLoop) add_squares();
          const int next = slice + 1 < params.slices ? slice + 1 : 0;
          if (params.slices > 1 && (next > 0 || block + tiles < params.tiles))
            ask(next), ask_norm(next);
        }
        float2* to = partials + (own * partial_size + lane / 4);
        if (!kByBlock && Span::kHasSums && lane < 4) {
          float sums[Span::kResults] = {};
#pragma unroll
          for (int e = 0; e < Span::kResults; ++e)
#pragma unroll
            for (int i = 0; i < Span::kBlocks; ++i) sums[e] += xs.sum_of(e, i);
          xs.add(to + sum_row, column_size, rows(), slice > 0, sums, false);
        }
        Window window;
        const int before =
            Shape::kMayBeginInWord
                ? scales_before<Span::kBlocks>(params, slice * warps + warp, lane / Span::kBlocks)
                : 0;
        for (int tile = 0; tile < tiles; ++tile, to += kTileN) {
          copies.next();
          if (kEarlyInLoop && tile == 0) {
            if (takes_x) add_squares();
            if (slice == 0) ask_early();
          }
          wait_copies<kStages - 1>();
          __syncwarp();
          const uint8_t* const weights = ring + copies.stage;
          const uint8_t* const scales = weights + Copies::kWeightBytes;
          float y[Span::kResults] = {};
          if constexpr (go_into_operand(kScales)) {
            const int blocks = ceil_div(params.K - first_k(slice), Span::kSpanK / Span::kBlocks);
            const auto with = [&](const auto& decoder) {
              multiply_scaled<kScales, Rows>(decoder, weights, scales, blocks, window, xs, y);
            };
            if (xs.codes.is_e2m1())
              with(E2M1Decoder{});
            else
#pragma unroll 1
              for (int plane = 0; plane < planes; ++plane) with(xs.codes.plane(plane));
          } else {
            if constexpr (kByBlock) {
              const auto made = terms_of_tile<kScales, kBits, Span::kBlocks, Term>(
                  params, before, scales, xs.codes.unit());
              const auto put = [&] {
#pragma unroll
                for (int i = 0; i < made.kCount; ++i) terms[lane + 32 * i] = made.of[i];
              };
              multiply<kScales, Rows>(weights, terms, put, xs, y);
            } else {
              multiply<kScales, Rows>(weights, terms, [] {}, xs, y);
            }
          }
          __syncwarp();
          xs.add(to, column_size, rows(), slice > 0, y, true);
        }
      }
    }
    if (kResultEarly && !exists) [[unlikely]]
      ask_early();

    if (next_may_begin(params.output, params.M)) let_next_begin();
    __syncthreads();
    for (int pair = first_pair; pair < all; pair += 2 * warps) {
      const bool is_first = pair == first_pair;
      if (!kResultEarly || !is_first) {
        result = result_of(pair);
        if (!kBesideEarly || !is_first || !exists) by = beside(result);
      }
      float2 sum{}, sum_x{}, squares{};
#pragma unroll 1
      for (int part = 0; part < parts(); ++part) {
        const float2* of_x = partials + (result.column + part) * column_size + sum_row;
        const float2* from = of_x - sum_row + result.tile * kTileN + lane % 16;
        const auto add_warp = [&] {
          sum.x += from->x, sum.y += from->y;
          if constexpr (!kByBlock && Span::kHasSums) sum_x.x += of_x->x, sum_x.y += of_x->y;
          if constexpr (kNormed) squares.x += of_x[1].x, squares.y += of_x[1].y;
          from += partial_size, of_x += partial_size;
        };
#pragma unroll(kRows <= 2 ? 8 : 4)
        for (int w = 0; w < warps; ++w) add_warp();
      }
      if (!kByBlock && exists) {
        if (!kTermsEarly || !is_first) term = row_term(result.n);
        // A table's unit comes in here: the table was not there yet when the terms were asked for.
        const float unit = xs.codes.unit();
        sum = {unit * (term.x * sum.x + term.y * sum_x.x),
               unit * (term.x * sum.y + term.y * sum_x.y)};
      }
      if constexpr (kOneRow) sum.x += sum.y, squares.x += squares.y;
      if (kNormed && !norm.is_one) {
        sum.x *= norm_factor(squares.x, params.K, params.eps);
        if (!kOneRow) sum.y *= norm_factor(squares.y, params.K, params.eps);
      }
      const float bias = exists ? float_of_bits(by.bias, params.output.bias.dtype) : NAN;
      if (has_global_scale() && exists) {
        const float scale = global_scale_value(params.output, by.scale);
        sum.x *= scale, sum.y *= scale;
      }
      sum.x += bias, sum.y += bias;
      float2 up{1, 1};
      if constexpr (kParts != Parts::kNone)
        if (is_gated(params.output.activation)) {
          up.x = __shfl_xor_sync(~0u, sum.x, 8);
          if (!kOneRow) up.y = __shfl_xor_sync(~0u, sum.y, 8);
        }
      if (!result.is_mine) continue;  // the loop is for whole warps
      const auto residual = [&](int m) {
        return float_of_bits(by.residual[m], params.output.residual.dtype);
      };
      const auto finish_row = [&](Index at, float of, float up, int m) {
        if (kTakesResidual && kParts == Parts::kNone && has_residual()) of += residual(m);
        finish<kParts>(params.output, at, of, up, residual(m));
      };
      finish_row(result.at, sum.x, up.x, 0);
      if (!kOneRow && result.second != result.at) finish_row(result.second, sum.y, up.y, 1);
    }
    if (block + tiles < params.tiles) __syncthreads();
  }
}

}  // namespace stream

}  // namespace jaxgemv::cuda
