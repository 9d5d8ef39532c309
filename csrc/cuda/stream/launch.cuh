// Chooses the variant of the streaming kernel and lays out its work.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
struct Stream {
  static constexpr bool kHasShift = kFormat == Format::kAffine;
  static constexpr bool kIsTable = kFormat == Format::kCodebook;
  static constexpr bool kInParts = std::is_same_v<X, float>;
  // With no kernels of their own for one scale a row, and for an epilogue without a norm.
  static constexpr bool kIsRare = stream::is_rare(kBits);
  // That share a read of the weights.
  static constexpr int kMaxRows = kInParts ? 1 : kIsRare ? 2 : kBits == 2 ? 8 : 16;
  // Of what is very rare there are the plain kernels alone: all together are much of a wheel's bytes.
  static constexpr bool kHasParts = kFormat != Format::kE5M2 && kBits > 1;
  static constexpr KernelInfo kInfo{
      "stream",
      kFormat,
      kBits,
      kDtypeOf<X>,
      kMaxRows,
      with_format(
          (kHasParts ? kEpilogueOperands | OperandSet::of(Operand::kNorm) : kProductOperands) |
              (kIsRare ? OperandSet{} : OperandSet::of(Operand::kOneByteScale)),
          kFormat)};

  // A row is whole 16-byte pieces, on aligned memory, and all numbers fit into 32 bits.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    return problem.N >= stream::kTileN && problem.N < (1 << 30) && problem.K < (1 << 25) &&
           problem.K * kBits % 128 == 0 && is_aligned(operands.packed, 16) &&
           is_aligned(operands.x, 16) && is_aligned(operands.norm.data, 16) &&
           problem.M <= most_rows(problem, operands, find_scales(problem, operands));
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const Call call{problem, operands, device, stream, find_scales(problem, operands)};
    const Scales scales = call.found.scales;
    const int units = call.found.lane_units;
    if constexpr (kIsTable) {
      if (scales == Scales::kE8M0) return run_parts<Scales::kE8M0, 4>(call);
      if (scales == Scales::kE4M3) return run_parts<Scales::kE4M3, 4>(call);
    }
    if (scales == Scales::kByHalf) {
      if constexpr (has_halves(4))
        if (units == 4) return run_parts<Scales::kByHalf, 4>(call);
      if constexpr (has_halves(2))
        if (units == 2) return run_parts<Scales::kByHalf, 2>(call);
      if constexpr (has_halves(1) || kIsTable) return run_parts<Scales::kByHalf, 1>(call);
    }
    if constexpr (!kIsRare)
      if (scales == Scales::kByRow) return run_parts<Scales::kByRow, 4>(call);
    if constexpr (has_units(2))
      if (units == 2) return run_parts<Scales::kByBlock, 2>(call);
    if constexpr (has_units(1))
      if (units == 1) return run_parts<Scales::kByBlock, 1>(call);
    return run_parts<Scales::kByBlock, has_units(4) ? 4 : 2>(call);
  }

 private:
  using Scales = stream::Scales;
  // Each kMaxRows rows have CTAs of their own, next to each other, so that memory is read once.
  // Only kernels for 8 rows can do that. Where a block has two groups, 8 of 16 rows have.
  static constexpr int kMostRows = kBits == 2 ? 64 : kMaxRows;
  static constexpr bool kHasBytes = kHasShift || kIsTable;  // XInt8, for one and two rows
  static constexpr int kReserved = 1024;  // of a CTA's shared memory, by the system

  // A lane's shares of a block that there are kernels for; it has 16 bytes of x or more. Of tables four words are
  // left out: their groups are mostly of 64 or less.
  static constexpr bool has_units(int lane_units) {
    if (kIsTable) return lane_units < 4;
    if (kBits == 1) return lane_units == 4;
    return kBits == 8 ? lane_units > 1 : !kIsRare || lane_units != 2;
  }

  // Of one row of x, those that there are kernels for where each half of a block is a group, so that half as many
  // groups end. (Of one unit tables have them for more rows too.)
  static constexpr bool has_halves(int lane_units) {
    if (kInParts || kBits == 1 || kBits == 8) return false;
    if (kIsRare) return lane_units == 4;
    return kBits == 2 ? lane_units < 4 : lane_units > 1;
  }
  template <Scales kScales, int kUnits>
  static constexpr bool kIsOneRow = kScales == Scales::kByHalf && (kHasShift || kUnits > 1);

  // Blocks of one word a lane are too many for more rows.
  static constexpr int max_rows(int lane_units) {
    return lane_units == 1 && !kIsTable ? std::min(8, kMaxRows) : kMaxRows;
  }

  // Whether there are kernels with parts: tables with scales that are rare have none.
  static constexpr bool has_parts(Scales scales, int lane_units) {
    const bool is_rare = scales == Scales::kByRow || (scales == Scales::kByHalf && lane_units == 1);
    return kHasParts && !(kIsTable && is_rare);
  }
  // Rows of x that an epilogue without a norm is there for. Of integers with more than two it is XLA's, as choose.h
  // says, but for a scale of one byte, which is part of these kernels.
  static constexpr int epilogue_rows(Scales scales) {
    if (kHasShift) return scales == Scales::kByRow ? kMaxRows : std::min(2, kMaxRows);
    return kIsTable && !stream::go_into_operand(scales) ? 2 : 8;
  }

  // Rows of x that share a read with a norm, where there are more than two: as registers allow.
  template <Scales kScales, int kUnits>
  static constexpr int kNormedRows =
      (kBits == 4 && !stream::go_into_operand(kScales) ? 8 : 4) / (kUnits > 1 ? 1 : 2);

  // lane_units: a lane's share of a block, of which a group is 2^group_log.
  struct Found {
    bool found = false;
    Scales scales = Scales::kByRow;
    int lane_units = 0, group_log = 0;
    bool odd_rows = false;  // begin in the middle of a word of scales
  };

  struct Call {
    const Problem& problem;
    const Operands& operands;
    const Device& device;
    cudaStream_t stream;
    Found found;
  };

  // Whether there is a kernel for odd rows of scales: of common widths for two groups of a span or more.
  static constexpr bool may_be_odd(int lane_units, int group_log) {
    constexpr int kUnits = has_units(4) ? 4 : 2;
    using Shape = stream::SpanShape<kFormat, kBits, 2, Scales::kByBlock, kUnits, Parts::kNone>;
    static_assert(Shape::kMayBeginInWord);
    const int blocks = stream::SpanRows<kBits, Shape::kSpanBytes, kUnits>::kBlocks;
    return lane_units == kUnits && (kIsRare || blocks >> group_log >= 2);
  }

  static Found find_scales(const Problem& problem, const Operands& operands) {
    const Param &scale = operands.scale, &shift = operands.shift;
    const bool has_one = scale.g_stride == 0 && shift.g_stride == 0;
    if (has_one && !kIsRare) return {true};
    const int size = size_of(scale.dtype);
    const auto suits = [&](const Param& p) {
      return size_of(p.dtype) == size && (has_one ? p.n_stride == 1 : p.g_stride == 1) &&
             p.stack_stride * size % 4 == 0 && is_aligned(p.data, 4);
    };
    // Rows of 16-bit scales may be no whole words, if tiles, of a gated activation in both halves, can begin
    // with even ones.
    const bool odd = scale.n_stride * size % 4 != 0;
    if (odd && (size != 2 || problem.N % (is_gated(problem.activation) ? 4 : 2) != 0)) return {};
    if ((kHasShift && size == 1) || !suits(scale) || !suits(shift) ||
        scale.n_stride != shift.n_stride || problem.N * scale.n_stride * size >= Index{1} << 31)
      return {};
    const bool whole = kIsTable && scale.dtype == Dtype::kE8M0 && problem.group == 32;
    const bool halves = problem.M == 1 && !has_one && !odd && !whole;
    for (const int lane_units : {4, 2, 1}) {
      const Index block = lane_units * 32 * stream::Unit<kBits, 1>::kBytes / kBits;
      if (has_halves(lane_units) && halves && block == 2 * problem.group)
        return {true, Scales::kByHalf, lane_units, -1};
      if (!has_units(lane_units)) continue;
      for (int log = 0; has_one || block << log <= problem.group; ++log)
        if (has_one ? block << log >= problem.K : block << log == problem.group) {
          if (odd && !may_be_odd(lane_units, log)) return {};
          return {true, whole ? Scales::kE8M0 : Scales::kByBlock, lane_units, log, odd};
        }
    }
    if (kIsTable && problem.group == 64 / kBits && size < 4 && !odd)
      return {true, scale.dtype == Dtype::kE4M3 ? Scales::kE4M3 : Scales::kByHalf, 1, -1};
    return {};
  }

  static constexpr int log_of(unsigned power) { return std::bit_width(power) - 1; }

  static bool has_epilogue(const Problem& problem, const Operands& operands, Scales scales) {
    const bool is_factor =
        stream::go_into_operand(scales) && ScaledCodes::is_factor(operands.global_scale);
    // What has one or two rows as bytes, in kernels of its own.
    const bool is_few =
        kInParts || kIsRare || (kHasBytes && !stream::go_into_operand(scales) && problem.M <= 2);
    return problem.activation != Activation::kNone ||
           (operands.residual.data != nullptr && is_few) ||
           (operands.global_scale.data != nullptr && !is_factor) ||
           (kHasShift && !is_wide(operands.scale.dtype));
  }

  static Index most_rows(const Problem& problem, const Operands& operands, const Found& found) {
    if (!found.found) return 0;
    const bool normed = operands.norm.data != nullptr;
    const Index most = kMostRows > kMaxRows ? kMostRows : max_rows(found.lane_units);
    if (!(normed || has_epilogue(problem, operands, found.scales))) return most;
    if (!has_parts(found.scales, found.lane_units)) return 0;
    if (kHasShift && (normed || found.scales == Scales::kByRow)) return most;
    return normed ? 8 : epilogue_rows(found.scales);
  }

  // Scales of one byte are part of the kernels of integers that have parts.
  template <Scales kScales, int kUnits>
  static cudaError_t run_parts(const Call& call) {
    const auto& [problem, operands, device, stream, found] = call;
    if constexpr (has_parts(kScales, kUnits)) {
      if (operands.norm.data != nullptr)
        return run_rows<kScales, kUnits, Parts::kNormAndEpilogue>(call);
      constexpr auto kEpilogue = kIsRare ? Parts::kNormAndEpilogue : Parts::kEpilogue;
      if (has_epilogue(problem, operands, kScales))
        return run_rows<kScales, kUnits, kEpilogue>(call);
    }
    return run_rows<kScales, kUnits, Parts::kNone>(call);
  }

  // One row of float32 is two of bytes.
  template <Scales kScales, int kUnits, Parts kParts>
    requires(kInParts || kIsRare || kIsOneRow<kScales, kUnits>)
  static cudaError_t run_rows(const Call& call) {
    return launch<kIsOneRow<kScales, kUnits> ? 1 : 2, kScales, kUnits, kParts>(call);
  }

  template <Scales kScales, int kUnits, Parts kParts>
    requires(!kInParts && !kIsRare && !kIsOneRow<kScales, kUnits>)
  static cudaError_t run_rows(const Call& call) {
    const Index M = call.problem.M;
    constexpr int kMost =
        kScales == Scales::kByHalf
            ? 8
            : std::min(max_rows(kUnits),
                       kParts == Parts::kEpilogue ? epilogue_rows(kScales) : kMaxRows);
    if constexpr (kHasBytes && !stream::go_into_operand(kScales)) {
      // Only with 4 bits, or where a block has two groups, does one row have a kernel of its own.
      constexpr bool kHalves = kScales == Scales::kByHalf;
      constexpr int kOne = (kBits == 4 && !kIsTable && kUnits == 4) || kHalves ? 1 : 2;
      using One = stream::SpanShape<kFormat, kBits, kOne, kScales, kUnits, kParts>;
      const int blocks = stream::SpanRows<kBits, One::kSpanBytes, kUnits>::kBlocks;
      const bool begins_in_word = kScales == Scales::kByBlock &&
                                  size_of(call.operands.scale.dtype) == 2 &&
                                  (call.found.odd_rows || blocks >> call.found.group_log < 2);
      if (M == 1 && (One::kMayBeginInWord || !begins_in_word))
        return launch<kOne, kScales, kUnits, kParts>(call);
      if constexpr (kMost == 2)
        return launch<2, kScales, kUnits, kParts>(call);
      else if constexpr (!kHalves)
        if (M <= 2) return launch<2, kScales, kUnits, kParts>(call);
    }
    if constexpr (kParts == Parts::kNormAndEpilogue) {
      return launch<kNormedRows<kScales, kUnits>, kScales, kUnits, kParts>(call);
    } else if constexpr (kMost > 2) {
      if (M <= 8 || kMost == 8) return launch<8, kScales, kUnits, kParts>(call);
      return launch<kMost, kScales, kUnits, kParts>(call);
    }
  }

  template <int kRows, Scales kScales, int kUnits, Parts kParts>
  static cudaError_t launch(const Call& call) {
    const auto& [problem, operands, device, stream, found] = call;
    using Shape = stream::SpanShape<kFormat, kBits, kRows, kScales, kUnits, kParts>;
    constexpr int kSpanBytes = Shape::kSpanBytes;
    using Rows = stream::SpanRows<kBits, kSpanBytes, kUnits>;
    constexpr int kBlocks = Rows::kBlocks;
    constexpr int kRingBytes = stream::WarpMemory<kFormat, kScales, Rows, Shape::kStages>::kBytes;
    using Span = stream::Span<kFormat, kBits, X, kRows, kScales, kSpanBytes, kUnits, kParts>;
    constexpr bool kMTiles =
        kParts == Parts::kNormAndEpilogue
            ? !kIsRare && kRows == kNormedRows<kScales, kUnits>
            : kRows == 8 && (kMostRows > kMaxRows || kScales == Scales::kByHalf);
    // Where operands of x are made of floats or bytes, a kernel is for all types of it. (With float8, and scales in
    // the operand, 4 to 16 rows take up to 14% longer so: docs/cuda-notes.md.)
    constexpr bool kIsAnyX =
        kParts == Parts::kNormAndEpilogue ||
        (kHasBytes && !stream::go_into_operand(kScales) && (kIsTable || kRows <= 2));
    const auto kernel =
        stream::gemv_stream<kFormat, kBits, std::conditional_t<kIsAnyX, stream::AnyX, X>, kRows,
                            kMTiles, kScales, kUnits, kParts>;

    stream::Params params{};
    params.packed = operands.packed, params.index = operands.index;
    params.x = operands.x, params.x_dtype = problem.x;
    params.M = static_cast<int>(problem.M), params.N = static_cast<int>(problem.N);
    params.K = static_cast<int>(problem.K), params.row_bytes = params.K / 8 * kBits;
    params.group_log = found.group_log;
    const int size = size_of(operands.scale.dtype);
    params.scale_row = size * static_cast<int>(operands.scale.n_stride);
    params.scale_log = size / 2;
    const int words_log = stream::go_into_operand(kScales)
                              ? log_of(stream::operand_scale_bytes(kScales) / 4)
                              : log_of(kBlocks) - found.group_log + params.scale_log - 2;
    params.spans_log = std::max(-words_log, 0);
    params.odd_rows = found.odd_rows, params.words_log = std::max(words_log, 0) + params.odd_rows;
    params.affine = problem.affine, params.stack = static_cast<uint32_t>(problem.stack);
    params.scale = operands.scale, params.shift = operands.shift;
    params.codebook = operands.codebook;
    params.packed_stack_stride = operands.packed_stack_stride;
    params.output = output_of(problem, operands);
    params.eps = problem.eps;
    if (const Param& norm = operands.norm; norm.data != nullptr) {
      const int bytes = size_of(norm.dtype);
      params.norm = static_cast<const char*>(norm.data), params.norm_dtype = norm.dtype;
      params.norm_stack_bytes = norm.stack_stride * bytes;
      params.norm_bytes = Span::kSpanK * bytes, params.norm_row_bytes = params.K * bytes;
    }

    // Tiles of a gated activation have half as many rows, pairs of them.
    const bool gated = is_gated(problem.activation);
    const int N = gated ? params.N / 2 : params.N, tile = stream::kTileN / (gated ? 2 : 1);
    params.tile_step = tile, params.tile_apart = gated ? N : stream::kTileN / 2;
    const int more = params.tile_apart - stream::kTileN / 2;
    params.apart_bytes = more * Index{params.row_bytes};
    params.scale_apart = more * params.scale_row;
    // As many warps as share K evenly, and CTAs with the same number of rows each. What the warps
    // leave of the shared memory is for partial sums, 8 bytes for a row of the weights and a column.
    const int rows = kInParts ? 2 : std::min(params.M, kRows);
    const int columns = Span::kHalves ? 2 : ceil_div(rows, Span::kRowsAColumn);
    params.of_columns =
        (1 << stream::kOfColumnsLog) / ceil_div(std::min(params.M, kRows), Span::kRowsAColumn) + 1;
    const int column_bytes = columns * 8, x_bytes = rows * Span::kRowBytes + params.norm_bytes;
    const auto partial_bytes = [&](int tiles) {
      return (tiles * stream::kTileN + 4) * column_bytes;  // and the sums of x
    };
    const int least_bytes = kRingBytes + x_bytes + partial_bytes(1);
    const int table_bytes = decltype(Span::codes)::table_bytes_on(device.major);
    const int of_cta = kReserved + table_bytes;
    const int most_warps = std::min(Shape::kMaxWarps, (device.shared_bytes - of_cta) / least_bytes);
    const int spans = (params.row_bytes + kSpanBytes - 1) / kSpanBytes;
    params.slices = (spans + most_warps - 1) / most_warps;
    const int warps = (spans + params.slices - 1) / params.slices;
    // A CTA prepares x anew, so where 8 warps an SM are reached, more CTAs must have 96 rows each
    // (H200, int2, M = 1, the shapes of docs/cuda-notes.md: 72 rows are slower, 108 faster).
    const int ctas_an_sm =
        std::min({std::max({params.N / (device.sms * 96), 8 / warps, 1}), most_warps / warps,
                  device.shared_bytes / (of_cta + warps * least_bytes)});
    params.m_tiles = (params.M + kRows - 1) / kRows;
    const int most_ctas = std::max(device.sms * ctas_an_sm / params.m_tiles, 1);
    // Where N is not whole tiles, one CTA more spares others a second one: some have a row less, and
    // compute the last of the CTA before again.
    const int all = ceil_div(N, tile);
    params.unit = found.odd_rows ? 2 : 1;
    const bool has_one_each =
        params.unit == 1 && all <= most_ctas && N / all == tile - 1 && N % all > 0;
    const int ctas = has_one_each ? all : std::min(N / tile, most_ctas);
    const int units = N / params.unit;
    params.rows_a_cta = units / ctas * params.unit, params.more = units % ctas;
    params.tiles = ceil_div(params.rows_a_cta + (params.more > 0 ? params.unit : 0), tile);
    // x of a single slice is read before the first sum is there, so these may lie in its place. Copies
    // want whole lines.
    constexpr int kLine = 128;
    const bool in_place = params.slices == 1;
    const int beside = kRingBytes + (in_place ? 0 : x_bytes);  // partial sums, of a warp
    int room = (device.shared_bytes / ctas_an_sm - of_cta) / warps - beside;
    if (in_place) room = room / kLine * kLine;
    const int most_tiles = (room / column_bytes - 4) / stream::kTileN;  // one at the least
    params.block_tiles = ceil_div(params.tiles, ceil_div(params.tiles, most_tiles));
    params.partial_bytes = partial_bytes(params.block_tiles);
    if (in_place)
      params.partial_bytes = ceil_div(std::max(x_bytes, params.partial_bytes), kLine) * kLine;
    params.x_bytes = in_place ? params.partial_bytes : x_bytes;
    params.partials = in_place ? 0 : warps * x_bytes;
    const int bytes = table_bytes + warps * (beside + params.partial_bytes);
    const dim3 grid(static_cast<unsigned>(ctas * params.m_tiles),
                    static_cast<unsigned>(problem.batch));
    return launch_kernel(kernel, {grid, warps * 32, bytes}, device, stream, params);
  }
};

// Of 16-bit x; and of any.
template <Format kFormat, int kBits>
inline constexpr Kernel kStreamRows[] = {row<Stream<kFormat, kBits, __half>>(),
                                         row<Stream<kFormat, kBits, __nv_bfloat16>>()};
template <int kBits>
inline constexpr Kernel kStreamIntegers[] = {row<Stream<Format::kAffine, kBits, __half>>(),
                                             row<Stream<Format::kAffine, kBits, __nv_bfloat16>>(),
                                             row<Stream<Format::kAffine, kBits, float>>()};

}  // namespace jaxgemv::cuda
