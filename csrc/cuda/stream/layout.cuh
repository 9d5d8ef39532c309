// The layout of a call of the streaming kernel: the parameters that describe its operands, and how work and shared
// memory are divided.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/launch.cuh"
#include "variants.cuh"

namespace jaxgemv::cuda::stream {

// The properties of a kernel variant that its layout depends on.
struct VariantSizes {
  Scales scales;
  int rows, rows_a_column;  // of x: that share a read; in a column of partial sums
  int parts;                // that a row of x is split into
  bool has_halves;          // whether it takes two columns
  int span_bytes, span_codes, span_blocks;
  int max_warps;
  // Bytes of shared memory: a warp's ring, a row of x for a warp, and a CTA's table.
  int ring_bytes, x_row_bytes, table_bytes;
};

struct Layout {
  int ctas, warps, bytes;  // CTAs along x of the grid; warps and shared bytes of a CTA
};

// How many teams, of `warps` warps each, a CTA has, and how many CTAs fit on an SM. wanted: teams an SM that registers
// and rings have room for. most_ctas: CTAs that fit if each has a table. all: teams an SM that there is work for.
struct Teams {
  int in_cta, ctas_an_sm;

  Teams(int wanted, int all, int warps, int most_ctas, bool has_table)
      : in_cta(1), ctas_an_sm(std::min(wanted, most_ctas)) {
    const int useful = std::min(wanted, all);
    if (has_table && ctas_an_sm < useful && std::has_single_bit(static_cast<unsigned>(warps)))
      in_cta = useful, ctas_an_sm = 1;
  }
};

constexpr int log_of(unsigned power) { return std::bit_width(power) - 1; }

// The parameters that do not depend on the layout.
inline Params params_of(const Problem& problem, const Operands& operands, const Found& found,
                        int bits, const VariantSizes& variant) {
  Params p{};
  p.packed = operands.packed, p.index = operands.index;
  p.x = operands.x, p.x_dtype = problem.x;
  p.M = static_cast<int>(problem.M), p.N = static_cast<int>(problem.N);
  p.K = static_cast<int>(problem.K), p.row_bytes = 4 * ceil_div(p.K * bits, 32);
  p.group_log = found.group_log;
  const int size = size_of(operands.scale.dtype);
  p.scale_row = size * static_cast<int>(operands.scale.n_stride);
  p.scale_log = size / 2;
  const int words_log = go_into_operand(variant.scales)
                            ? log_of(operand_scale_bytes(variant.scales) / 4)
                            : log_of(variant.span_blocks) - found.group_log + p.scale_log - 2;
  p.spans_log = std::max(-words_log, 0);
  p.odd_rows = found.odd_rows, p.words_log = std::max(words_log, 0) + p.odd_rows;
  p.affine = problem.affine, p.stack = static_cast<uint32_t>(problem.stack);
  p.scale = operands.scale, p.shift = operands.shift;
  p.codebook = operands.codebook;
  p.packed_stack_stride = operands.packed_stack_stride;
  p.output = output_of(problem, operands);
  p.eps = problem.eps;
  if (const Param& norm = operands.norm; norm.data != nullptr) {
    const int bytes = size_of(norm.dtype);
    p.norm = static_cast<const char*>(norm.data), p.norm_dtype = norm.dtype;
    p.norm_stack_bytes = norm.stack_stride * bytes;
    p.norm_bytes = variant.span_codes * bytes, p.norm_row_bytes = p.K * bytes;
  }
  return p;
}

// As many warps as share K evenly, and CTAs with the same number of rows each. The shared memory that warps leave
// is for partial sums, 8 bytes for each row of the weights and column.
inline Layout lay_out(const Problem& problem, const Device& device, const Found& found,
                      const VariantSizes& variant, Params& p) {
  constexpr int kReserved = 1024;  // bytes that the system takes of a CTA
  // With a gated activation a tile has half as many rows, each of them a pair.
  const bool gated = is_gated(problem.activation);
  p.unit = found.odd_rows ? 2 : 1;
  const int N = gated ? p.N / 2 : ceil_div(p.N, p.unit) * p.unit, tile = kTileN / (gated ? 2 : 1);
  p.tile_step = tile, p.tile_apart = gated ? N : kTileN / 2;
  const int more = p.tile_apart - kTileN / 2;
  p.apart_bytes = more * Index{p.row_bytes};
  p.scale_apart = more * p.scale_row;

  const int own = std::min(p.M, variant.rows), rows = own * variant.parts;
  const int columns = variant.has_halves ? 2 : ceil_div(rows, variant.rows_a_column);
  p.of_columns = (1 << kOfColumnsLog) / ceil_div(own, variant.rows_a_column) + 1;
  const int column_bytes = columns * 8, x_bytes = rows * variant.x_row_bytes + p.norm_bytes;
  const auto partial_bytes = [&](int tiles) {
    return (tiles * kTileN + 4) * column_bytes;  // + 4: for the sums of x
  };
  const int least_bytes = variant.ring_bytes + x_bytes + partial_bytes(1);
  const int of_cta = kReserved + variant.table_bytes;
  const int most_warps = std::min(variant.max_warps, (device.shared_bytes - of_cta) / least_bytes);
  const int spans = ceil_div(p.row_bytes, variant.span_bytes);
  p.slices = ceil_div(spans, most_warps);
  const int warps = ceil_div(spans, p.slices);

  // Each team prepares x again, so that beyond 8 warps an SM, more teams must have 96 rows each
  // (H200, int2, M = 1, the shapes of docs/cuda-notes.md: 72 rows are slower, 108 faster).
  const int wanted =
      std::min(std::max({p.N / (device.sms * 96), 8 / warps, 1}), most_warps / warps);
  p.m_tiles = ceil_div(p.M, variant.rows);
  const Teams teams(wanted, ceil_div(N / tile * p.m_tiles, device.sms), warps,
                    device.shared_bytes / (of_cta + warps * least_bytes),
                    variant.table_bytes > 0 && p.slices == 1);
  const int most_teams = std::max(device.sms * teams.ctas_an_sm * teams.in_cta / p.m_tiles, 1);
  // Where N is not a multiple of a tile, one CTA more spares the others a second tile: some CTAs have a row less,
  // and compute the last row of the CTA before them again.
  const int all = ceil_div(N, tile);
  const bool has_one_each = p.unit == 1 && all <= most_teams && N / all == tile - 1 && N % all > 0;
  const int most = has_one_each ? all : std::min(N / tile, most_teams);
  p.teams = std::min(teams.in_cta, most);
  p.team_warps = warps, p.team_log = p.teams > 1 ? log_of(warps) : 31;
  const int ctas = most / p.teams, all_teams = ctas * p.teams;
  const int units = N / p.unit;
  p.rows_a_cta = units / all_teams * p.unit, p.more = units % all_teams;
  p.tiles = ceil_div(p.rows_a_cta + (p.more > 0 ? p.unit : 0), tile);

  // With a single slice, x is in registers before the first sum is written, so that partial sums may take its place.
  // Copies want whole lines.
  constexpr int kLine = 128;
  const bool in_place = p.slices == 1;
  const int beside = variant.ring_bytes + (in_place ? 0 : x_bytes);  // partial sums, of a warp
  const int all_warps = p.teams * warps;
  int room = (device.shared_bytes / teams.ctas_an_sm - of_cta) / all_warps - beside;
  if (in_place) room = room / kLine * kLine;
  const int most_tiles = (room / column_bytes - 4) / kTileN;  // at least one
  p.block_tiles = ceil_div(p.tiles, ceil_div(p.tiles, most_tiles));
  p.partial_bytes = partial_bytes(p.block_tiles);
  if (in_place) p.partial_bytes = ceil_div(std::max(x_bytes, p.partial_bytes), kLine) * kLine;
  p.x_bytes = in_place ? p.partial_bytes : x_bytes;
  p.partials = in_place ? 0 : all_warps * x_bytes;
  return {ctas * p.m_tiles, all_warps,
          variant.table_bytes + all_warps * (beside + p.partial_bytes)};
}

}  // namespace jaxgemv::cuda::stream
