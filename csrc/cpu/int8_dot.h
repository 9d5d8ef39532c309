// Few rows of x by integer dot products. Under the rule of isa/kernels.h: internal linkage.
//
// Converting codes to float32 takes more instructions than memory leaves time for. Instead x becomes
// fixed point, with a quantum for each run of codes, and is cut into slices, signed bytes or 16-bit
// words; products of slices and codes are summed exactly, and become float32 once a run.
//
// Weights are unpacked in the order that takes the fewest instructions (common/codes.h), and the
// slices of x are put in the same order beforehand.
#pragma once

#include "common/codes.h"
#include "dot_strips.h"
#include "int8_dot_x.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
struct Int8Dot : SlicedX<C> {
  static constexpr const char* kName = "int8_dot";
  static constexpr int kRows = kDotRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype x) { return is_wide(x); }
  static constexpr int kSteps = C::kSteps;
  using XPacked = SlicedX<C>;
  using Shape = typename XPacked::Shape;
  using Packed = typename XPacked::Packed;

  static bool supports(const Problem& p, const Operands&) {
    return p.M <= kDotRows && suits_blocks(p.group, p.K, XPacked::kCodes);
  }

  // The value of a run in quanta, from the sums of its slices.
  template <int kSlices>
  static Floats value_of(const Ints (&sum)[kSlices]) {
    if constexpr (kSliceWidth == 8) {
      const Ints low = sum[0] + (sum[1] << 8), high = sum[2] + (sum[3] << 8);
      Floats value = to_floats(high) * 65536.f + to_floats(low);
      if constexpr (kSlices == 5) value += to_floats(sum[4]) * 0x1p-8f;
      return value;
    } else {
      Floats value = to_floats(sum[1]) * 65536.f + to_floats(sum[0]);
      if constexpr (kSlices == 3) value += to_floats(sum[2]) * 0x1p-16f;
      return value;
    }
  }

  // sum += products of a block.
  template <int kXRows, int kSlices, int kCount>
  static void add_block(const C& codes, const Ints (&w)[kCount], const float* slices,
                        Ints (&sum)[kCount][kXRows][kSlices]) {
    JAXGEMV_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m, slices += kAllSlices * kLanes) {
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const Ints w_step = codes.at(w[r], step);
          JAXGEMV_UNROLL
          for (int slice = 0; slice < kSlices; ++slice)
            sum[r][m][slice] = dot(sum[r][m][slice], w_step, load_ints(slices + slice * kLanes));
        }
      }
    }
  }

  // factors[row of x][run] <- scale * quantum, for a row of the weight.
  template <int kXRows>
  static void make_factors(const Shape& shape, const Packed& x, const float* scales,
                           float* factors) {
    const float* quanta = x.quanta;
    for (int m = 0; m < kXRows; ++m, quanta += padded(shape.runs), factors += shape.factors_size) {
      if (shape.group_runs == 1) {
        for (Index g = 0; g < shape.groups; g += kLanes)
          store_floats(factors + g, load_floats(scales + g) * load_floats(quanta + g));
        continue;
      }
      for (Index run = 0, g = 0; run < shape.runs; ++g)
        for (Index i = 0; i < shape.group_runs; ++i, ++run) factors[run] = scales[g] * quanta[run];
    }
  }

  // total[r][m]: lanes that add up to dot(weights of row r, row m of x), without the offsets.
  // Not inline: its sums take all registers.
  template <int kXRows, int kSlices, int kCount = kSumsAtOnce / kXRows>
  __attribute__((noinline)) static void multiply(const C& codes, const Shape& shape,
                                                 const Packed& x,
                                                 const uint8_t* const (&rows)[kCount],
                                                 const float* factors,
                                                 Floats (&total)[kCount][kXRows]) {
    const Index last_words = shape.last_words, blocks = shape.blocks;
    const Index size = shape.factors_size;
    const Index whole_blocks = shape.whole_blocks, group_size = shape.group_blocks;
    const float* slices = x.slices;
    Floats acc[kCount][kXRows] = {};
    Index group_end = group_size;
    for (Index block = 0; block < blocks;) {
      const Index end = min_of(min_of(block + XPacked::kMaxRun, group_end), blocks);
      Ints sum[kCount][kXRows][kSlices] = {};
      for (; block < end; ++block, slices += kSteps * kXRows * kAllSlices * kLanes) {
        Ints w[kCount];
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const uint8_t* from = rows[r] + block * XPacked::kBytes;
          __builtin_prefetch(from + kAhead);
          w[r] = load_words(from, block < whole_blocks ? XPacked::kWords : last_words);
        }
        add_block(codes, w, slices, sum);
      }
      JAXGEMV_UNROLL
      for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m)
        acc[r][m] += value_of(sum[r][m]) * factors[(r * kXRows + m) * size];
      ++factors;
      if (end == group_end) group_end += group_size;
    }
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
    for (int m = 0; m < kXRows; ++m) total[r][m] = acc[r][m];
  }

  // total += the products of one row of the weight, where blocks hold several groups.
  template <int kXRows, int kSlices>
  static void add_narrow(const C& codes, const Shape& shape, const Packed& x, const uint8_t* row,
                         const float* scales, const LaneGroups<XPacked::kCodes>& lanes,
                         Floats (&total)[kXRows]) {
    const float *slices = x.slices, *quanta = x.quanta, *scale = scales;
    const Index runs = padded(shape.runs);
    const auto add = [&](const uint8_t* from, Index words,
                         Ints group_of_lane) __attribute__((always_inline)) {
      __builtin_prefetch(from + kStripAhead);
      const Ints w[1] = {load_words(from, words)};
      Ints sum[1][kXRows][kSlices] = {};
      add_block(codes, w, slices, sum);
      const Floats by = lookup(load_floats(scale), group_of_lane);
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m) total[m] += value_of(sum[0][m]) * quanta[m * runs] * by;
      slices += kSteps * kXRows * kAllSlices * kLanes, scale += shape.block_groups, ++quanta;
    };
    for (Index block = 0; block < shape.whole_blocks; ++block)
      add(row + block * XPacked::kBytes, XPacked::kWords, lanes.of_whole);
    if (shape.whole_blocks < shape.blocks)
      add(row + shape.whole_blocks * XPacked::kBytes, shape.last_words, lanes.of_last);
    const SmallX* const small = x.small + (kSlices == kAllSlices ? kXRows : 0);
    for (int m = 0; m < kXRows; ++m)
      if (small[m].count > 0) total[m][0] += small[m].template times<C>(row, scales);
  }

  template <int kXRows>
  using Params = RowParams<C, kSumsAtOnce / kXRows>;
  static Index scratch_size(const Problem& p, const Operands&) {
    const Shape shape(p);
    if (shape.is_narrow) return Strip<C>::size(p);
    return Params<1>::scratch_size(p) + kSumsAtOnce * shape.factors_size;
  }

  template <int kXRows, int kSlices>
  static void run_narrow(const Problem& p, const Operands& o, Index slice, Index stack,
                         const Packed& x, Index begin, Index end, float* scratch) {
    const C codes(p, o, stack);
    const Shape shape(p);
    const LaneGroups<XPacked::kCodes> lanes(p);
    for_each_strip<C, kXRows>(p, o, slice, stack, begin, end, x.sums, scratch,
                              [&](const uint8_t* row, const float* scales, Floats(&total)[kXRows]) {
                                add_narrow<kXRows, kSlices>(codes, shape, x, row, scales, lanes,
                                                            total);
                              });
  }

  template <int kXRows, int kSlices>
  static void run_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                       const Packed& x, Index begin, Index end, float* scratch) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    const Shape shape(p);
    const Index size = shape.factors_size;
    Params<kXRows> params(p, o, stack, scratch);
    float* const factors = scratch + Params<kXRows>::scratch_size(p);
    for_each_rows<kXRows>(
        p, o, slice, stack, begin, end, [&](const RowsAt<kCount>& at, float (&y)[kCount][kXRows]) {
          Floats total[kCount][kXRows];
          params.move_to(at);
          for (int r = 0; r < kCount; ++r)
            make_factors<kXRows>(shape, x, params.scales() + r * params.scales_size(),
                                 factors + r * kXRows * size);
          multiply<kXRows, kSlices>(codes, shape, x, at.codes, factors, total);
          for (int r = 0; r < kCount; ++r)
            for (int m = 0; m < kXRows; ++m) {
              y[r][m] = sum_of(total[r][m] + params.shift(r, x.sums + m * padded(shape.groups)));
              const SmallX& small = x.small[(kSlices == kAllSlices ? kXRows : 0) + m];
              if (small.count > 0)
                y[r][m] += small.template times<C>(at.codes[r], factors + (r * kXRows + m) * size);
            }
        });
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* packed,
                  Index begin, Index end, float* scratch) {
    const Packed x(p, packed);
    const auto run_x_rows = [&]<int kXRows>(std::integral_constant<int, kXRows>) {
      const auto run_slices = [&]<int kSlices>(std::integral_constant<int, kSlices>) {
        const auto run =
            Shape(p).is_narrow ? run_narrow<kXRows, kSlices> : run_rows<kXRows, kSlices>;
        run(p, o, slice, stack, x, begin, end, scratch);
      };
      if (x.needs_all_slices(p))
        run_slices(std::integral_constant<int, kAllSlices>());
      else
        run_slices(std::integral_constant<int, kFewSlices>());
    };
    if (p.M == 1)
      run_x_rows(std::integral_constant<int, 1>());
    else
      run_x_rows(std::integral_constant<int, kDotRows>());
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
