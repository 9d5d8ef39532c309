// Few rows of int8 x by integer dot products: int8_dot.h with one slice, x itself. Under the rule of
// isa/kernels.h: internal linkage.
#pragma once

#include "common/x.h"
#include "dot_strips.h"
#include "int8_dot_x.h"

namespace jaxgemv::cpu {
namespace {

template <typename CodesOf>
struct Int8XDot {
  using C = CodesOf;
  static constexpr const char* kName = "int8_dot";
  static constexpr int kRows = kDotRows;
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kInt8Parts;
  static constexpr bool takes(Dtype x) { return x == Dtype::kI8; }
  static constexpr int kUnits = 32 * kLanes / kSliceWidth;
  static constexpr int kCodes = C::kSteps * kUnits, kBytes = 4 * C::kWords, kVectors = C::kSteps;
  // Sums are exact in 32 bits: in a run a lane adds up 2^16 products at most, each below 2^15 in magnitude.
  static constexpr Index kMaxRun = (Index{1} << 16) * kLanes / kCodes;
  using Slice = std::conditional_t<kSliceWidth == 8, int8_t, int16_t>;

  static bool is_grouped(const Problem& p) { return p.x_group > 0 && p.x_group < p.K; }
  // Whether each lane of a block has its own scale, of the weights or of x.
  static bool is_by_lane(const Problem& p) {
    return is_grouped(p) || (p.group < kCodes && p.group < p.K);
  }

  static bool supports(const Problem& p, const Operands&) {
    return p.M <= kDotRows &&
           (p.is_exact() || (suits_blocks(p.group, p.K, kCodes) &&
                             (!is_grouped(p) || p.x_group % (kCodes / kLanes) == 0)));
  }

  // The packed x, in this order.
  struct Packed {
    float* scale;     // [row]: of x, unless lanes have theirs
    float* sums;      // [row][group]: of x times its scale, or integers
    float* of_lanes;  // [block][row][lane]: scales of x
    float* x;         // [block][row][step]: vectors
    Index size;

    Packed(const Problem& p, float* at) {
      const Index blocks = ceil_div(p.K, Index{kCodes});
      scale = at;
      sums = scale + kLanes;
      of_lanes = sums + p.M * padded(groups_of(p));
      x = of_lanes + (is_by_lane(p) ? blocks * p.M * kLanes : 0);
      size = x - at + blocks * p.M * kVectors * kLanes;
    }
  };
  static Index x_size(const Problem& p, const Operands&) { return Packed(p, nullptr).size; }
  static void prepare(const Problem& p, const Operands&, float* out) {
    const Packed to(p, out);
    for (float* sum = to.sums; sum < to.of_lanes; ++sum) *sum = 0;
  }

  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Packed to(p, out);
    for (Index m = m0; m < m1; ++m) {
      const int8_t* from = x.int8_row(m);
      to.scale[m] = is_by_lane(p) ? 1 : x.int8_scale(m, 0);
      add_up(x, m, from, to.sums + m * padded(groups_of(p)));
      for (Index k = 0, block = 0; k < p.K; k += kCodes, ++block) {
        int8_t natural[kCodes] = {};
        __builtin_memcpy(natural, from + k, static_cast<size_t>(min_of(kCodes, p.K - k)));
        Slice* slices = reinterpret_cast<Slice*>(to.x + (block * p.M + m) * kVectors * kLanes);
        for (int step = 0; step < C::kSteps; ++step)
          for (int i = 0; i < kUnits; ++i) *slices++ = natural[C::place(step, i)];
        for (Index lane = 0; is_by_lane(p) && lane < kLanes; ++lane)
          to.of_lanes[(block * p.M + m) * kLanes + lane] =
              x.int8_scale(m, min_of(k + lane * kCodes / kLanes, p.K - 1));
      }
    }
    return true;
  }

  static void add_up(const X& x, Index m, const int8_t* from, float* sums) {
    const Problem& p = x.p;
    for (Index g = 0, k = 0; k < p.K; ++g) {
      float sum = 0;
      int32_t exact = 0;
      for (const Index end = min_of((g + 1) * p.group, p.K); k < end;) {
        const Index stop = is_grouped(p) ? min_of((k / p.x_group + 1) * p.x_group, end) : end;
        const float scale = x.int8_scale(m, k);
        int64_t part = 0;
        for (; k < stop; ++k) part += from[k];
        exact += static_cast<int32_t>(part), sum += static_cast<float>(part) * scale;
      }
      sums[g] = p.is_exact() ? f32_of_bits(static_cast<uint32_t>(exact)) : sum;
    }
  }

  using Sum = Ints;
  static Ints load_block(const uint8_t* from, Index words) {
    return words >= kLanes ? load_words(from) : load_words(from, words);
  }
  template <int kXRows>
  static void add(const C& codes, Ints words, const float* x, Ints (&sum)[kXRows]) {
    JAXGEMV_UNROLL
    for (int step = 0; step < C::kSteps; ++step) {
      const Ints w = codes.at(words, step);
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m)
        sum[m] = dot(sum[m], w, load_ints(x + (m * kVectors + step) * kLanes));
    }
  }
  template <bool kByLane>
  static void add_scaled(Floats& total, Ints sum, Floats scale, const float* of_lanes) {
    total += to_floats(sum) * (kByLane ? scale * load_floats(of_lanes) : scale);
  }
  template <bool>
  static void add_scaled(Ints& total, Ints sum, Floats, const float*) {
    total += sum;
  }

  static Index scratch_size(const Problem& p, const Operands&) {
    if (is_by_lane(p)) return Strip<C>::size(p);
    return RowParams<C, kSumsAtOnce>::scratch_size(p);
  }

  template <int kXRows, bool kWide>
  static void run_by_lane(const Problem& p, const Operands& o, Index slice, Index stack,
                          const Packed& x, Index begin, Index end, float* scratch) {
    const C codes(p, o, stack);
    const LaneGroups<kCodes> lanes(p);
    const Runs runs = Runs::of<Int8XDot>(p);
    for_each_strip<C, kXRows>(p, o, slice, stack, begin, end, x.sums, scratch,
                              [&](const uint8_t* row, const float* scales, Floats(&total)[kXRows]) {
                                add_row<Int8XDot, kWide>(codes, runs, x.x, row, scales, lanes,
                                                         x.of_lanes, total);
                              });
  }

  template <int kXRows>
  static void run_scaled(const Problem& p, const Operands& o, Index slice, Index stack,
                         const Packed& x, Index begin, Index end, float* scratch) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    const Runs runs = Runs::of<Int8XDot>(p);
    RowParams<C, kCount> params(p, o, stack, scratch);
    for_each_rows<kXRows>(
        p, o, slice, stack, begin, end, [&](const RowsAt<kCount>& at, float (&y)[kCount][kXRows]) {
          Floats total[kCount][kXRows];
          params.move_to(at);
          add_runs<Int8XDot, false, 0>(codes, runs, x.x, at.codes, params.scales(),
                                       params.scales_size(), Ints{}, x.x, total);
          for (int r = 0; r < kCount; ++r)
            for (int m = 0; m < kXRows; ++m)
              y[r][m] = sum_of(total[r][m] * x.scale[m] +
                               params.shift(r, x.sums + m * padded(groups_of(p))));
        });
  }

  template <int kXRows>
  static void run_exact(const Problem& p, const Operands& o, Index slice, Index stack,
                        const Packed& x, Index begin, Index end, float* none) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    Problem whole = p;
    whole.group = p.K;
    const Runs runs = Runs::of<Int8XDot>(whole);
    none[0] = 0;
    for_each_rows<kXRows>(
        p, o, slice, stack, begin, end, [&](const RowsAt<kCount>& at, float (&y)[kCount][kXRows]) {
          Ints total[kCount][kXRows];
          add_runs<Int8XDot, false, 0>(codes, runs, x.x, at.codes, none, 0, Ints{}, x.x, total);
          for (int r = 0; r < kCount; ++r)
            for (int m = 0; m < kXRows; ++m) {
              int32_t sum = 0;
              for (int lane = 0; lane < kLanes; ++lane) sum += total[r][m][lane];
              for (Index g = 0; g < groups_of(p); ++g)
                sum -= zero_of(p, o, stack, at.n[r], g) *
                       load<int32_t>(x.sums, m * padded(groups_of(p)) + g);
              y[r][m] = f32_of_bits(static_cast<uint32_t>(sum));
            }
        });
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* packed,
                  Index begin, Index end, float* scratch) {
    const Packed x(p, packed);
    const auto run_x_rows = [&]<int kXRows>(std::integral_constant<int, kXRows>) {
      const auto run = p.is_exact()       ? run_exact<kXRows>
                       : !is_by_lane(p)   ? run_scaled<kXRows>
                       : p.group > kCodes ? run_by_lane<kXRows, true>
                                          : run_by_lane<kXRows, false>;
      run(p, o, slice, stack, x, begin, end, scratch);
    };
    if (p.M == 1)
      run_x_rows(std::integral_constant<int, 1>());
    else
      run_x_rows(std::integral_constant<int, kDotRows>());
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
