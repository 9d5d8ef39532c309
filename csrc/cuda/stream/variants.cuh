// Which variants of the streaming kernel there are, and which calls they take.
#pragma once

#include <algorithm>

#include "span.cuh"

namespace jaxgemv::cuda::stream {

// How a call's weights and scales lie. lane_units: a lane's units of a block; a group is 2^group_log blocks.
struct Found {
  bool found = false;
  Scales scales = Scales::kByRow;
  int lane_units = 0, group_log = 0;
  bool odd_rows = false;  // odd rows begin in the middle of a word of scales
  // Whether weights are copied by words: if rows are no whole 16 bytes, or their scales suit no other kernel.
  bool by_words = false;
};

// The variants for a format, a width and a type of x.
template <Format kFormat, int kBits, typename X>
struct Variants {
  static constexpr bool kHasShift = kFormat == Format::kAffine;
  static constexpr bool kIsTable = kFormat == Format::kCodebook;
  static constexpr bool kIsWide = std::is_same_v<X, float>;
  // A row of float32 x is two rows of bytes beside integers; beside other formats it goes through kernels with a norm.
  static constexpr bool kInParts = kIsWide && kHasShift, kAsNormed = kIsWide && !kHasShift;
  // Rare widths have no kernels of their own for one scale a row, nor for an epilogue without a norm.
  static constexpr bool kIsRare = is_rare(kBits);
  // The most rows of x that share a read of the weights.
  static constexpr int kMaxRows = kIsWide ? 1 : kIsRare ? 2 : kBits == 2 ? 8 : 16;
  // What is very rare has only plain kernels, without parts: all together are a large share of a wheel's bytes.
  static constexpr bool kHasParts = kFormat != Format::kE5M2 && kBits > 1;

  // With more rows, each kMaxRows of them have CTAs of their own, next to each other, so that memory is read once.
  // Only kernels for 8 rows can do that. Where a block has two groups, this holds for each 8 of 16 rows.
  static constexpr int kMostRows = kBits == 2 ? 64 : kMaxRows;
  // Whether one and two rows of x are bytes (XInt8).
  static constexpr bool kHasBytes = kHasShift || (kIsTable && !kIsWide);

  // Whether there are kernels in which a lane has so many units of a block; it has 16 bytes of x or more. Tables have
  // none for four words: their groups are mostly of 64 or less.
  static constexpr bool has_units(int lane_units) {
    if (kIsTable) return lane_units < 4;
    if (kBits == 1) return lane_units == 4;
    return kBits == 8 ? lane_units > 1 : !kIsRare || lane_units != 2;
  }

  // The same for one row of x where each half of a block is a group, which halves the number of blocks
  // that end. (With one unit, tables have these kernels for more rows too.)
  static constexpr bool has_halves(int lane_units) {
    if (kIsWide || kBits == 1 || kBits == 8) return false;
    if (kIsRare) return lane_units == 4;
    return kBits == 2 ? lane_units < 4 : lane_units > 1;
  }
  template <Scales kScales, int kUnits>
  static constexpr bool kIsOneRow = kScales == Scales::kByHalf && (kHasShift || kUnits > 1);

  // With one word a lane there are too many blocks for more than 8 rows.
  static constexpr int max_rows(int lane_units) {
    return lane_units == 1 && !kIsTable ? std::min(8, kMaxRows) : kMaxRows;
  }

  // Whether there are kernels with parts: tables have none for a scale a row or for halves of blocks of one unit.
  static constexpr bool has_parts(Scales scales, int lane_units) {
    const bool has_rare =
        scales == Scales::kByRow || (scales == Scales::kByHalf && lane_units == 1);
    return kHasParts && !(kIsTable && has_rare);
  }
  // The most rows of x with an epilogue and no norm. For integers with more than two rows XLA does it, as choose.h
  // says, except with a one-byte scale for each row, which is part of these kernels.
  static constexpr int epilogue_rows(Scales scales) {
    if (kHasShift) return scales == Scales::kByRow ? kMaxRows : std::min(2, kMaxRows);
    return kIsTable && !go_into_operand(scales) ? 2 : 8;
  }

  // Rows of x that share a read with a norm, if there are more than two: as many as registers allow.
  template <Scales kScales, int kUnits>
  static constexpr int kNormedRows =
      (kBits == 4 && !go_into_operand(kScales) ? 8 : 4) / (kUnits > 1 ? 1 : 2);

  // Whether there is a kernel for odd rows of scales: for common widths only with two groups or more in a span.
  static constexpr bool may_be_odd(int lane_units, int group_log) {
    constexpr int kUnits = has_units(4) ? 4 : 2;
    using Shape = SpanShape<kFormat, kBits, 2, Scales::kByBlock, kUnits, Parts::kNone>;
    static_assert(Shape::kMayBeginInWord);
    const int blocks = SpanRows<kBits, Shape::kSpanBytes, kUnits>::kBlocks;
    return lane_units == kUnits && (kIsRare || blocks >> group_log >= 2);
  }

  // Whether there are kernels that copy weights by words, for such scales.
  static constexpr bool has_words(Scales scales) {
    return kHasBytes && (scales == Scales::kByRow || scales == Scales::kByBlock);
  }

  static Found find_scales(const Problem& problem, const Operands& operands) {
    const Param &scale = operands.scale, &shift = operands.shift;
    const bool has_one = scale.g_stride == 0 && shift.g_stride == 0;
    bool by_words = problem.K * kBits % 128 != 0 || !is_aligned(operands.packed, 16);
    if (has_one && !kIsRare) return {.found = true, .by_words = by_words};
    const int size = size_of(scale.dtype);
    const auto suits = [&](const Param& p) {
      return size_of(p.dtype) == size && (has_one ? p.n_stride == 1 : p.g_stride == 1) &&
             p.stack_stride * size % 4 == 0 && is_aligned(p.data, 4);
    };
    // Rows of 16-bit scales may be no whole words. Then tiles have to begin with even rows, with a gated activation in
    // both halves.
    const bool odd = scale.n_stride * size % 4 != 0;
    if (odd && size != 2) return {};
    by_words |= odd && problem.N % (is_gated(problem.activation) ? 4 : 2) != 0;
    if ((kHasShift && size == 1) || !suits(scale) || !suits(shift) ||
        scale.n_stride != shift.n_stride || problem.N * scale.n_stride * size >= Index{1} << 31)
      return {};
    const bool whole = kIsTable && scale.dtype == Dtype::kE8M0 && problem.group == 32;
    const bool halves = problem.M == 1 && !has_one && !odd && !whole && !by_words;
    for (const int lane_units : {4, 2, 1}) {
      const Index block = lane_units * 32 * Unit<kBits, 1>::kBytes / kBits;
      if (has_halves(lane_units) && halves && block == 2 * problem.group)
        return {true, Scales::kByHalf, lane_units, -1};
      if (!has_units(lane_units)) continue;
      for (int log = 0; has_one || block << log <= problem.group; ++log)
        if (has_one ? block << log >= problem.K : block << log == problem.group) {
          by_words |= odd && !may_be_odd(lane_units, log);
          return {true, whole ? Scales::kE8M0 : Scales::kByBlock, lane_units, log, odd, by_words};
        }
    }
    if (kIsTable && problem.group == 64 / kBits && size < 4 && !odd && !by_words)
      return {true, scale.dtype == Dtype::kE4M3 ? Scales::kE4M3 : Scales::kByHalf, 1, -1};
    return {};
  }

  static bool is_normed(const Operands& operands) {
    return kAsNormed || operands.norm.data != nullptr;
  }

  static bool has_epilogue(const Problem& problem, const Operands& operands, Scales scales) {
    const bool is_factor = go_into_operand(scales) && ScaledCodes::is_factor(operands.global_scale);
    // Whether one or two rows are bytes, which have kernels of their own.
    const bool is_few = kIsRare || (kHasBytes && !go_into_operand(scales) && problem.M <= 2);
    return problem.activation != Activation::kNone ||
           (operands.residual.data != nullptr && is_few) ||
           (operands.global_scale.data != nullptr && !is_factor) ||
           (kHasShift && !is_wide(operands.scale.dtype));
  }

  static Index most_rows(const Problem& problem, const Operands& operands, const Found& found) {
    if (!found.found) return 0;
    const bool normed = is_normed(operands);
    if (found.by_words) {
      const bool is_plain = !normed && is_wide(operands.scale.dtype) &&
                            !has_epilogue(problem, operands, found.scales);
      return has_words(found.scales) && is_plain ? std::min(kMaxRows, 2) : 0;
    }
    const Index most = kMostRows > kMaxRows ? kMostRows : max_rows(found.lane_units);
    if (!(normed || has_epilogue(problem, operands, found.scales))) return most;
    if (!has_parts(found.scales, found.lane_units)) return 0;
    if (kHasShift && (normed || found.scales == Scales::kByRow)) return most;
    return normed ? std::min(kMaxRows, 8) : epilogue_rows(found.scales);
  }
};

}  // namespace jaxgemv::cuda::stream
