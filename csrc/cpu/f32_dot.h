// Few rows of x with weights whose codes stand for floats: these are looked up or converted in registers,
// in the order of memory. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "common/blocks.h"
#include "common/fixed_point.h"
#include "common/x.h"
#include "dot_rows.h"

namespace jaxgemv::cpu {
namespace {

// What takes few instructions to load.
template <Format kFormat, int kBits>
  requires(kFormat != Format::kAffine && Block<kBits>::kUnitIsByte &&
           Exists<Codes<kFormat, kBits, XKind::kFloats>>)
struct Codes<kFormat, kBits, XKind::kBlocks> : Codes<kFormat, kBits, XKind::kFloats> {
  using Codes<kFormat, kBits, XKind::kFloats>::Codes;
};

template <typename C>
struct F32Dot {
  static constexpr const char* kName = "f32_dot";
  static constexpr int kRows = kDotRows;
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype x) { return is_wide(x); }
  using B = Block<C::kBits>;
  // Blocks that are summed by themselves, for accuracy.
  static constexpr Index kMaxRun = kRunCodes / B::kCodes;

  static bool is_narrow(const Problem& p) { return p.group < B::kCodes; }

  // Rows are whole blocks, groups are too, or blocks whole groups and these whole lanes.
  static bool supports(const Problem& p, const Operands&) {
    return p.M <= kDotRows && p.K % B::kCodes == 0 &&
           (p.group >= p.K || p.group % B::kCodes == 0 ||
            (B::kCodes % p.group == 0 && p.group % B::kUnit == 0));
  }

  // [block][row][code of a unit][lane]
  static Index x_size(const Problem& p, const Operands&) { return p.M * p.K; }
  static void prepare(const Problem&, const Operands&, float*) {}
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    for (Index k = 0; k < p.K; k += B::kCodes)
      for (Index m = m0; m < m1; ++m) {
        float natural[B::kCodes], *to = out + k * p.M + m * B::kCodes;
        x.read(m, k, B::kCodes, natural);
        for (int i = 0; i < B::kCodes; ++i) to[i % B::kUnit * kLanes + i / B::kUnit] = natural[i];
      }
    return true;
  }

  // total[r][m]: lanes whose sum is dot(weights of row r, row m of x). scales: [row][group].
  template <int kXRows, bool kNarrow, int kCount = kSumsAtOnce / kXRows>
  static void multiply(const C& codes, const Problem& p, const float* x,
                       const uint8_t* const (&rows)[kCount], const float* scales, Index size,
                       Ints group_of_lane, Floats (&total)[kCount][kXRows]) {
    const Index blocks = p.K / B::kCodes;
    const Index group_size = kNarrow ? 1 : p.group >= p.K ? blocks : p.group / B::kCodes;
    const Index groups = kNarrow ? B::kCodes / p.group : 1;  // of a block
    Floats acc[kCount][kXRows] = {};
    Index group_end = group_size;
    for (Index block = 0; block < blocks;) {
      const Index end = kNarrow ? block + 1 : min_of(min_of(block + kMaxRun, group_end), blocks);
      Floats sum[kCount][kXRows] = {};
      for (; block < end; ++block) {
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const uint8_t* from = rows[r] + block * B::kBytes;
          __builtin_prefetch(from + kAhead);
          const auto units = load_units<C>(from);
          JAXGEMV_UNROLL
          for (int i = 0; i < B::kUnit; ++i) {
            const Floats w = values_of(codes, units, i);
            JAXGEMV_UNROLL
            for (int m = 0; m < kXRows; ++m)
              sum[r][m] += w * load_floats(x + m * B::kCodes + i * kLanes);
          }
        }
        x += kXRows * B::kCodes;
      }
      JAXGEMV_UNROLL
      for (int r = 0; r < kCount; ++r) {
        const float* scale = scales + r * size;
        const Floats by = kNarrow ? lookup(load_floats(scale), group_of_lane) : broadcast(*scale);
        JAXGEMV_UNROLL
        for (int m = 0; m < kXRows; ++m) acc[r][m] += sum[r][m] * by;
      }
      if (end == group_end) group_end += group_size, scales += groups;
    }
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
    for (int m = 0; m < kXRows; ++m) total[r][m] = acc[r][m];
  }

  // A row's scales, and what lookups read behind them.
  static Index scales_size(const Problem& p) { return padded(groups_of(p)) + kLanes; }
  static Index scratch_size(const Problem& p, const Operands&) {
    return kSumsAtOnce * scales_size(p);
  }

  template <int kXRows, bool kNarrow>
  static void run_rows(const Problem& p, const Operands& o, Index slice, Index stack,
                       const float* x, Index begin, Index end, float* scales) {
    constexpr int kCount = kSumsAtOnce / kXRows;
    const C codes(p, o, stack);
    const Ints group_of_lane = groups_of_lanes<B::kCodes>(p);
    const Index groups = groups_of(p), size = scales_size(p);
    for_each_rows<kXRows>(p, o, slice, stack, begin, end,
                          [&](const Index(&n)[kCount], const uint8_t* const(&rows)[kCount],
                              float (&y)[kCount][kXRows]) {
                            Floats total[kCount][kXRows];
                            for (int r = 0; r < kCount; ++r)
                              read_groups(o.scale, stack, n[r], groups, scales + r * size);
                            multiply<kXRows, kNarrow>(codes, p, x, rows, scales, size,
                                                      group_of_lane, total);
                            for (int r = 0; r < kCount; ++r)
                              for (int m = 0; m < kXRows; ++m) y[r][m] = sum_of(total[r][m]);
                          });
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const auto run = p.M == 1 ? (is_narrow(p) ? run_rows<1, true> : run_rows<1, false>)
                              : (is_narrow(p) ? run_rows<2, true> : run_rows<2, false>);
    run(p, o, slice, stack, x, begin, end, scratch);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
