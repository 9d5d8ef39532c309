// Few rows of bfloat16 x by dot products of pairs of bfloat16, in place of int8_dot.h and f32_dot.h where the
// processor has them: 32 codes take one lookup and one product. Under the rule of isa/kernels.h: internal linkage.
//
// What is rounded, and which x is left to other kernels, is as in bf16_panel.h. But weights stay in the order of
// memory: step s of a block (a vector of words) has codes s and s + 16 / kBits of each word.
#pragma once

#include "common/codes.h"
#include "common/fixed_point.h"
#include "common/x.h"
#include "dot_strips.h"
#include "isa/avx512bf16.h"

namespace jaxgemv::cpu {
namespace {

// Only widths for which a word holds whole codes.
template <Format kFormat, int kBits>
  requires(8 % kBits == 0 && Codes<kFormat, kBits, XKind::kPairs>::kIsLookedUp)
struct Codes<kFormat, kBits, XKind::kPairBlocks> : Codes<kFormat, kBits, XKind::kPairs> {
  using Codes<kFormat, kBits, XKind::kPairs>::Codes;
};

template <typename CodesOf>
struct Bf16Dot {
  using C = CodesOf;
  static constexpr const char* kName = "bf16_dot";
  static constexpr int kRows = kDotRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kBF16; }
  static constexpr int kWordCodes = 32 / C::kBits, kSteps = kWordCodes / 2;
  static constexpr int kCodes = kLanes * kWordCodes, kBytes = 4 * kLanes, kVectors = kSteps;
  static constexpr int kMaxRun = kRunCodes / kCodes;  // blocks; for accuracy

  static bool supports(const Problem& p, const Operands& o) {
    return p.M <= kDotRows && suits_blocks(p.group, p.K, kCodes) && C::suits(p, o);
  }

  // [row][group], sums of x; then [block][row][step], vectors of pairs.
  static Index sums_size(const Problem& p) { return p.M * padded(groups_of(p)); }
  static Index x_size(const Problem& p, const Operands&) {
    return sums_size(p) + ceil_div(p.K, Index{kCodes}) * p.M * kSteps * kLanes;
  }
  static void prepare(const Problem& p, const Operands&, float* out) {
    for (Index i = 0; i < sums_size(p); ++i) out[i] = 0;
  }

  struct InOrder {
    uint16_t code[2 * kLanes] = {};
    constexpr InOrder() {
      for (int i = 0; i < 2 * kLanes; ++i) code[i] = static_cast<uint16_t>(i);
    }
  };
  static constexpr InOrder kInOrder{};

  // False if an element of x is out of range.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    constexpr int kVector = 2 * kLanes;
    const Problem& p = x.p;
    XPairs pairs(kInOrder.code);
    for (Index m = m0; m < m1; ++m) {
      const char* from = static_cast<const char*>(x.o.x) + (x.slice * p.M + m) * p.K * 2;
      float* const sums = out + m * padded(groups_of(p));
      for (Index k = 0; k < p.K; k += kCodes) {
        uint16_t natural[kCodes];
        for (Index i = 0; i < kCodes; i += kVector) {
          float unused[kLanes];
          for (Index at = k + i; at < min_of(k + i + kVector, p.K);) {
            const Index group = at / p.group, end = min_of((group + 1) * p.group, k + i + kVector);
            sums[group] += sum_of(
                pairs.pack(from + (k + i) * 2, at - k - i, min_of(end, p.K) - k - i, unused));
            at = end;
          }
        }
        const Index count = min_of(kCodes, p.K - k);
        __builtin_memcpy(natural, from + k * 2, static_cast<size_t>(count) * 2);
        for (Index i = count; i < kCodes; ++i) natural[i] = 0;
        float* to = out + sums_size(p) + (k / kCodes * p.M + m) * (kSteps * kLanes);
        for (int step = 0; step < kSteps; ++step)
          for (int lane = 0; lane < kLanes; ++lane) {
            const uint16_t* const first = natural + lane * kWordCodes + step;
            const uint32_t pair = first[0] | static_cast<uint32_t>(first[kSteps]) << 16;
            to[step * kLanes + lane] = f32_of_bits(pair);
          }
      }
    }
    return pairs.in_range();
  }

  using Sum = Floats;
  static Ints load_block(const uint8_t* from, Index words) {
    return words >= kLanes ? load_words(from) : load_words(from, words);
  }
  template <int kXRows>
  static void add(const C& codes, Ints words, const float* x, Floats (&sum)[kXRows]) {
    JAXGEMV_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const Ints w = lookup_halves(words >> (step * C::kBits), codes.table);
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m)
        sum[m] = dot_pairs(sum[m], w, load_ints(x + (m * kSteps + step) * kLanes));
    }
  }
  template <bool kByLane>
  static void add_scaled(Floats& total, Floats sum, Floats scale, const float*) {
    total += sum * scale;
  }

  static bool is_by_lane(const Problem& p) { return p.group < kCodes && p.group < p.K; }
  static Index scratch_size(const Problem& p, const Operands&) {
    if (is_by_lane(p)) return Strip<C>::size(p);
    return RowParams<C, kSumsAtOnce>::scratch_size(p);
  }

  template <int kXRows>
  static void run_by_lane(const Problem& p, const Operands& o, Index slice, Index stack,
                          const float* sums, Index begin, Index end, float* scratch) {
    const C codes(p, o, stack);
    const LaneGroups<kCodes> lanes(p);
    const Runs runs = Runs::of<Bf16Dot>(p);
    const float* const x = sums + sums_size(p);
    for_each_strip<C, kXRows>(p, o, slice, stack, begin, end, sums, scratch,
                              [&](const uint8_t* row, const float* scales, Floats(&total)[kXRows]) {
                                add_row<Bf16Dot, false>(codes, runs, x, row, scales, lanes, x,
                                                        total);
                              });
  }

  template <int kXRows>
  static void run_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                       const float* sums, Index begin, Index end, float* scratch) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    const Runs runs = Runs::of<Bf16Dot>(p);
    const float* const x = sums + sums_size(p);
    RowParams<C, kCount> params(p, o, stack, scratch);
    for_each_rows<kXRows>(
        p, o, slice, stack, begin, end, [&](const RowsAt<kCount>& at, float (&y)[kCount][kXRows]) {
          Floats total[kCount][kXRows];
          params.move_to(at);
          add_runs<Bf16Dot, false, 0>(codes, runs, x, at.codes, params.scales(),
                                      params.scales_size(), Ints{}, x, total);
          for (int r = 0; r < kCount; ++r)
            for (int m = 0; m < kXRows; ++m)
              y[r][m] = sum_of(total[r][m] + params.shift(r, sums + m * padded(groups_of(p))));
        });
  }

  template <int kXRows>
  static void run_x_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                         const float* x, Index begin, Index end, float* scratch) {
    const auto run = is_by_lane(p) ? run_by_lane<kXRows> : run_rows<kXRows>;
    run(p, o, slice, stack, x, begin, end, scratch);
  }
  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    (p.M == 1 ? run_x_rows<1> : run_x_rows<kDotRows>)(p, o, slice, stack, x, begin, end, scratch);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
