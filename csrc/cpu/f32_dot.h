// Few rows of x and weights whose codes stand for floats, which are looked up or converted in registers, in the
// order of memory. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include <type_traits>

#include "common/blocks.h"
#include "common/fixed_point.h"
#include "common/x.h"
#include "dot_rows.h"

namespace jaxgemv::cpu {
namespace {

// Only widths that take few instructions to load.
template <Format kFormat, int kBits>
  requires(kFormat != Format::kAffine && Block<kBits>::kUnitIsByte &&
           Exists<Codes<kFormat, kBits, XKind::kFloats>>)
struct Codes<kFormat, kBits, XKind::kBlocks> : Codes<kFormat, kBits, XKind::kFloats> {
  using Codes<kFormat, kBits, XKind::kFloats>::Codes;
};

template <typename CodesOf>
struct F32Dot {
  using C = CodesOf;
  using B = Block<C::kBits>;
  static constexpr const char* kName = "f32_dot";
  static constexpr int kRows = kDotRows;
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype x) { return is_wide(x); }
  static constexpr int kCodes = B::kCodes, kBytes = B::kBytes, kVectors = B::kUnit;
  static constexpr int kMaxRun = kRunCodes / kCodes;  // for accuracy
  // The group of mxfp4 and mxfp8, which takes longest to scale: it has a loop of its own.
  static constexpr int kFixedGroup = 32;

  static bool supports(const Problem& p, const Operands&) {
    return p.M <= kDotRows && p.K % kCodes == 0 && suits_blocks(p.group, p.K, kCodes);
  }

  // [block][row][code of a unit][lane]
  static Index x_size(const Problem& p, const Operands&) { return p.M * p.K; }
  static void prepare(const Problem&, const Operands&, float*) {}
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    for (Index k = 0; k < p.K; k += kCodes)
      for (Index m = m0; m < m1; ++m) {
        float natural[kCodes], *to = out + k * p.M + m * kCodes;
        x.read(m, k, kCodes, natural);
        for (int i = 0; i < kCodes; ++i) to[i % B::kUnit * kLanes + i / B::kUnit] = natural[i];
      }
    return true;
  }

  using Sum = Floats;
  static auto load_block(const uint8_t* from, Index) { return load_units<C>(from); }
  template <int kXRows, typename Units>
  static void add(const C& codes, Units units, const float* x, Floats (&sum)[kXRows]) {
    JAXGEMV_UNROLL
    for (int i = 0; i < B::kUnit; ++i) {
      Floats w;
      if constexpr (kIsConverted)
        w = units;
      else
        w = values_of(codes, units, i);
      JAXGEMV_UNROLL
      for (int m = 0; m < kXRows; ++m) sum[m] += w * load_floats(x + m * kCodes + i * kLanes);
    }
  }
  template <bool kByLane>
  static void add_scaled(Floats& total, Floats sum, Floats scale, const float*) {
    total += sum * scale;
  }
  // Whether load_block converts codes to values, in units of C::kUnit.
  static constexpr bool kIsConverted = std::is_same_v<decltype(load_block(nullptr, 0)), Floats>;

  static Index scratch_size(const Problem& p, const Operands&) {
    return RowParams<C, kSumsAtOnce>::scratch_size(p);
  }

  template <int kXRows, bool kByLane, int kFixed>
  static void run_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                       const float* x, Index begin, Index end, float* scratch) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    const Ints group_of_lane = groups_of_lanes<kCodes>(p);
    const Runs runs = Runs::of<F32Dot>(p);
    RowParams<C, kCount> params(p, o, stack, scratch);
    for_each_rows<kXRows>(
        p, o, slice, stack, begin, end, [&](const RowsAt<kCount>& at, float (&y)[kCount][kXRows]) {
          Floats total[kCount][kXRows];
          params.move_to(at);
          add_runs<F32Dot, kByLane, kFixed>(codes, runs, x, at.codes, params.scales(),
                                            params.scales_size(), group_of_lane, x, total);
          for (int r = 0; r < kCount; ++r)
            for (int m = 0; m < kXRows; ++m) {
              y[r][m] = sum_of(total[r][m]);
              if constexpr (kIsConverted) y[r][m] *= C::kUnit;
            }
        });
  }

  template <int kXRows>
  static void run_x_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                         const float* x, Index begin, Index end, float* scratch) {
    const bool is_fixed = p.group == kFixedGroup && p.K % kFixedGroup == 0;
    const auto run = p.group < kCodes ? run_rows<kXRows, true, 1>
                     : is_fixed       ? run_rows<kXRows, false, kFixedGroup / kCodes>
                                      : run_rows<kXRows, false, 0>;
    run(p, o, slice, stack, x, begin, end, scratch);
  }
  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    (p.M == 1 ? run_x_rows<1> : run_x_rows<2>)(p, o, slice, stack, x, begin, end, scratch);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
