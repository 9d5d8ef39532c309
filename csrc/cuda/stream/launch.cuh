// Chooses the variant of the streaming kernel.
#pragma once

#include "kernel.cuh"
#include "layout.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
class Stream : stream::Variants<kFormat, kBits, X> {
  using V = stream::Variants<kFormat, kBits, X>;
  using Found = stream::Found;
  using Scales = stream::Scales;
  using V::kHasShift, V::kIsTable, V::kIsRare, V::kInParts, V::kAsNormed, V::kHasBytes, V::kMaxRows;

 public:
  static constexpr KernelInfo kInfo{
      "stream",
      kFormat,
      kBits,
      kDtypeOf<X>,
      kMaxRows,
      with_format(
          (V::kHasParts ? kEpilogueOperands | OperandSet::of(Operand::kNorm) : kProductOperands) |
              (kIsRare ? OperandSet{} : OperandSet::of(Operand::kOneByteScale)),
          kFormat)};

  // Needs aligned memory, and sizes that fit into 32 bits.
  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    const Found found = V::find_scales(problem, operands);
    // A row of y may be computed twice, and then its bias is read again: it must not be y.
    if (operands.bias.data != nullptr && operands.bias.data == operands.y) return false;
    // Beside float32 x, tables in registers are not exact enough.
    if (kAsNormed && kIsTable && !stream::go_into_operand(found.scales) &&
        !stream::has_large_shared(device.major))
      return false;
    return problem.N >= stream::kTileN && problem.N < (1 << 30) && problem.K < (1 << 25) &&
           is_aligned(operands.x, 16) && is_aligned(operands.norm.data, 16) &&
           problem.M <= V::most_rows(problem, operands, found);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const Call call{problem, operands, device, stream, V::find_scales(problem, operands)};
    const Scales scales = call.found.scales;
    const int units = call.found.lane_units;
    if constexpr (kIsTable) {
      if (scales == Scales::kE8M0) return run_parts<Scales::kE8M0, 4>(call);
      if (scales == Scales::kE4M3) return run_parts<Scales::kE4M3, 4>(call);
    }
    if (scales == Scales::kByHalf) {
      if constexpr (V::has_halves(4))
        if (units == 4) return run_parts<Scales::kByHalf, 4>(call);
      if constexpr (V::has_halves(2))
        if (units == 2) return run_parts<Scales::kByHalf, 2>(call);
      if constexpr (V::has_halves(1) || kIsTable) return run_parts<Scales::kByHalf, 1>(call);
    }
    if constexpr (!kIsRare)
      if (scales == Scales::kByRow) return run_parts<Scales::kByRow, 4>(call);
    if constexpr (V::has_units(2))
      if (units == 2) return run_parts<Scales::kByBlock, 2>(call);
    if constexpr (V::has_units(1))
      if (units == 1) return run_parts<Scales::kByBlock, 1>(call);
    return run_parts<Scales::kByBlock, V::has_units(4) ? 4 : 2>(call);
  }

 private:
  template <Scales kScales, int kUnits>
  static constexpr bool kIsOneRow = V::template kIsOneRow<kScales, kUnits>;
  template <Scales kScales, int kUnits>
  static constexpr int kNormedRows = V::template kNormedRows<kScales, kUnits>;

  struct Call {
    const Problem& problem;
    const Operands& operands;
    const Device& device;
    cudaStream_t stream;
    Found found;
  };

  // For integers, scales of one byte are supported only by kernels with parts.
  template <Scales kScales, int kUnits>
  static cudaError_t run_parts(const Call& call) {
    const auto& [problem, operands, device, stream, found] = call;
    if constexpr (V::has_words(kScales))
      if (found.by_words) return launch<2, kScales, kUnits, Parts::kNone, true>(call);
    if constexpr (V::has_parts(kScales, kUnits)) {
      if (V::is_normed(operands)) return run_rows<kScales, kUnits, Parts::kNormAndEpilogue>(call);
      constexpr auto kEpilogue = kIsRare ? Parts::kNormAndEpilogue : Parts::kEpilogue;
      if (V::has_epilogue(problem, operands, kScales))
        return run_rows<kScales, kUnits, kEpilogue>(call);
    }
    return run_rows<kScales, kUnits, Parts::kNone>(call);
  }

  template <Scales kScales, int kUnits, Parts kParts>
    requires(kAsNormed)
  static cudaError_t run_rows(const Call& call) {
    if constexpr (kParts == Parts::kNormAndEpilogue)
      return launch<kNormedRows<kScales, kUnits>, kScales, kUnits, kParts>(call);
    return cudaErrorNotSupported;  // most_rows excludes it
  }

  // A row of float32 is as much as two rows of bytes, so that there are kernels for one or two rows alone.
  template <Scales kScales, int kUnits, Parts kParts>
    requires(!kAsNormed && (kInParts || kIsRare || kIsOneRow<kScales, kUnits>))
  static cudaError_t run_rows(const Call& call) {
    return launch<kIsOneRow<kScales, kUnits> ? 1 : 2, kScales, kUnits, kParts>(call);
  }

  template <Scales kScales, int kUnits, Parts kParts>
    requires(!kAsNormed && !kInParts && !kIsRare && !kIsOneRow<kScales, kUnits>)
  static cudaError_t run_rows(const Call& call) {
    const Index M = call.problem.M;
    constexpr int kMost =
        kScales == Scales::kByHalf
            ? 8
            : std::min(V::max_rows(kUnits),
                       kParts == Parts::kEpilogue ? V::epilogue_rows(kScales) : kMaxRows);
    if constexpr (kHasBytes && !stream::go_into_operand(kScales)) {
      // One row has a kernel of its own only with 4 bits, or where a block has two groups.
      constexpr bool kHalves = kScales == Scales::kByHalf;
      constexpr int kOne = (kBits == 4 && !kIsTable && kUnits == 4) || kHalves ? 1 : 2;
      using One = stream::SpanShape<kFormat, kBits, kOne, kScales, kUnits, kParts>;
      const int blocks = stream::SpanRows<kBits, One::kSpanBytes, kUnits>::kBlocks;
      const int bytes = (blocks >> call.found.group_log) * size_of(call.operands.scale.dtype);
      const bool begins_in_word =  // or serves several spans
          kScales == Scales::kByBlock && (call.found.odd_rows || bytes < 4);
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

  template <int kRows, Scales kScales, int kUnits, Parts kParts, bool kByWords = false>
  static cudaError_t launch(const Call& call) {
    const auto& [problem, operands, device, stream, found] = call;
    using Shape = stream::SpanShape<kFormat, kBits, kRows, kScales, kUnits, kParts, kByWords>;
    using Rows = stream::SpanRows<kBits, Shape::kSpanBytes, kUnits>;
    using Span = stream::Span<kFormat, kBits, X, kRows, kScales, Shape::kSpanBytes, kUnits, kParts>;
    constexpr bool kMTiles =
        kParts == Parts::kNormAndEpilogue
            ? !kIsRare && kRows == kNormedRows<kScales, kUnits>
            : kRows == 8 && (V::kMostRows > kMaxRows || kScales == Scales::kByHalf);
    // Where x becomes operands by way of floats or bytes, one kernel is for all types of x. (With float8, and scales in
    // the operand, 4 to 16 rows would take up to 14% longer that way: docs/cuda-notes.md.)
    constexpr bool kIsAnyX =
        kParts == Parts::kNormAndEpilogue ||
        (kHasBytes && !stream::go_into_operand(kScales) && (kIsTable || kRows <= 2));
    const auto kernel =
        stream::gemv_stream<kFormat, kBits, std::conditional_t<kIsAnyX, stream::AnyX, X>, kRows,
                            kMTiles, kScales, kUnits, kParts, kByWords>;
    const stream::VariantSizes variant{
        .scales = kScales,
        .rows = kRows,
        .rows_a_column = Span::kRowsAColumn,
        .parts = kInParts ? 2 : 1,
        .has_halves = Span::kHalves,
        .span_bytes = Shape::kSpanBytes,
        .span_codes = Span::kSpanK,
        .span_blocks = Rows::kBlocks,
        .max_warps = Shape::kMaxWarps,
        .ring_bytes = stream::WarpMemory<kFormat, kScales, Rows, Shape::kStages>::kBytes,
        .x_row_bytes = Span::kRowBytes,
        .table_bytes = decltype(Span::codes)::table_bytes_on(device.major)};
    stream::Params params = stream::params_of(problem, operands, found, kBits, variant);
    const stream::Layout layout = stream::lay_out(problem, device, found, variant, params);
    const dim3 grid(static_cast<unsigned>(layout.ctas), static_cast<unsigned>(problem.batch));
    return launch_kernel(kernel, {grid, layout.warps * 32, layout.bytes}, device, stream, params);
  }
};

// The rows for 16-bit x alone.
template <Format kFormat, int kBits>
inline constexpr Kernel kStreamNarrow[] = {row<Stream<kFormat, kBits, __half>>(),
                                           row<Stream<kFormat, kBits, __nv_bfloat16>>()};

}  // namespace jaxgemv::cuda
