// Which kernel is used for how many rows of x, as measured; quoted titles are sections of docs/cpu-notes.md.
#pragma once

#include <string_view>

#include "../conditions.h"
#include "../row_limits.h"
#include "table.h"

namespace jaxgemv::cpu {

// Whether the codes of a group have at least kBits bits: amx_bf16 and amx_int8 multiply a row of an AMX tile,
// 512 bits, once for each group in it.
template <int kBits>
constexpr bool has_wide_groups(const Problem& p) {
  return p.group >= p.K || p.group * p.bits >= kBits;
}
constexpr bool has_bytes_divided(const Problem& p) { return 8 % p.bits == 0; }
// Whether amx_panel is fast with tables of finished weights: a codebook of 1, 2 or 4 bits, or codes
// of 3 and 5 bits where one table serves at least two steps; and the weight is not small.
constexpr bool has_tables(const Problem& p) {
  const bool is_fast = 4 % p.bits == 0 ? has_table(p) : p.bits <= 5 && p.group >= 64;
  return is_fast && p.N * p.K >= Index{1} << 19;
}
// amx_bf16 splits float16 x into two parts, which beside a codebook pays in a range of sizes alone.
constexpr bool is_for_bf16_tiles(const Problem& p) {
  return none<has_x<Dtype::kF16>>(p) || !has_table(p) || (p.M >= 15 && p.M <= 64 && p.K >= 1280);
}

// Rules for the kernels that can run a call. The rows of the kernel table are in order of preference too (isa/).
inline constexpr Crossover kCrossovers[] = {
    // "Finished weights on AMX", "Which kernel": from 65 rows on, everything; below, weights that other kernels have
    // no tiles for, or that these scale in narrow groups.
    {"amx_panel", 0, 65, kNoLimit},
    {"amx_panel", 0, 3, 64, kNoLimit, nullptr, OperandSet::of(Operand::kOneByteScale)},
    {"amx_panel", 0, 4, 64, kNoLimit, all<has_tables, has_integers>},
    {"amx_panel", 0, 6, 64, kNoLimit, has_tables},
    {"amx_panel", 0, 5, 12, kNoLimit, all<has_integers, none<has_width<3>>, has_columns<640>>},
    {"amx_panel", 0, 13, 64, kNoLimit, all<has_integers, none<has_width<3>>>},
    {"amx_panel", 4, 8, 64, kNoLimit, all<has_integers, none<has_wide_groups<256>>>},
    {"amx_panel", 4, 12, 64, kNoLimit, all<has_integers, none<has_wide_groups<512>>>},
    {"amx_panel", 0, 8, 64, kNoLimit,
     all<has_integers, has_width<6>, none<has_bytes_divided>, fills_panels>},
    {"amx_panel", 0, 12, 64, kNoLimit, none<has_float8, has_bytes_divided>},
    {"amx_panel", 8, 12, 64, kNoLimit, none<has_float8, has_wide_groups<512>>},
    {"amx_panel", 8, 17, 64, kNoLimit, has_integers},
    {"amx_panel", 0, 17, 64, kNoLimit, all<has_float8, none<has_wide_groups<512>>>},
    {"amx_panel", 0, 33, 64, kNoLimit, none<has_wide_groups<512>>},
    // "Slices on AMX", "Bytes on their way": int4 g128, float16 x, 12 rows take 1.29 ms instead of 1.43. Other formats
    // have no slices, and tables have two parts: "Tables and float8 on AMX, a few rows".
    {"amx_bf16", 0, 12, kNoLimit, kNoLimit, all<has_wide_groups<256>, is_for_bf16_tiles>},
    {"amx_bf16", 0, 6, kNoLimit, kNoLimit,
     all<has_x<Dtype::kF16>, has_integers, has_width<2>, has_wide_groups<512>>},
    {"amx_bf16", 0, 3, kNoLimit, kNoLimit,
     all<has_float8, any<has_x<Dtype::kBF16>, has_wide_groups<512>>>},
    {"amx_bf16", 4, 4, kNoLimit, kNoLimit,
     all<has_integers, has_x<Dtype::kBF16>, has_wide_groups<256>>},
    // Same sections: two rows take 0.96 ms instead of 1.32; one takes 0.86, but 0.68 in int8_dot. With few rows of
    // the weight, cutting x into slices does not pay ("Which kernel").
    {"amx_int8", 0, 3, 128, kNoLimit, all<has_rows<512>, has_wide_groups<512>>},
    {"amx_int8", 0, 2, 2, kNoLimit, all<has_rows<512>, has_columns<2560>, has_wide_groups<256>>},
    {"amx_int8", 8, 129, 512, kNoLimit, all<has_rows<512>, has_wide_groups<1024>>},
    {"amx_int8", 0, 3, 8, kNoLimit, all<has_codes<1>, has_wide_groups<512>>},
    {"amx_int8", 0, 3, 4, kNoLimit, all<has_rows<512>, has_wide_groups<256>>},
    // "Pairs of bfloat16 for few rows": as fast or faster at one row, at two 0.61 ms instead of 1.0. On AMX
    // there is none for integers.
    {"bf16_dot", 0, 1, 2},
    // "Which kernel for how many rows": at four rows it would take 4.1 ms instead of 2.45.
    {"int8_dot", 0, 1, 2},
    // "Codes that stand for floats": for one and two rows there is nothing else but panels.
    {"f32_dot", 0, 1, 2},
    {"int8_panel", 0, 1, kNoLimit},
    {"bf16_panel", 0, 3, kNoLimit},
    // "Finished weights without AMX": what bf16_panel does not take; nvfp4 with 12 rows takes 0.8 of f32_panel's time.
    {"bf16_weights", 0, 12, kNoLimit},
    {"f32_panel", 0, 1, kNoLimit},
    {"transposed", 0, 1, kNoLimit},
};

constexpr int kAllRows = 1 << 30;

// Rows of x up to which kernels are faster than XLA ("Above 64 rows", "Any number of rows"): avxvnni takes as long as
// avx2, and portable stays at 64 until someone times it where there is nothing else.
struct MostRows {
  std::string_view isa;
  Index products;
  Index norms = products;  // with a norm inside
};
inline constexpr MostRows kMostRows[] = {
    // Above 64 rows a normalised x of 16 bits may be rounded, as for amx_panel.
    {"amx", kAllRows, 64}, {"avx512bf16", kAllRows}, {"avx512vbmi", kAllRows},
    {"avx512", kAllRows},  {"avxvnni", 256},         {"avx2", 256},
    {"portable", 64},
};
// The same for gradients: up to so many rows no dequantised weight is written ("Above 64 rows"), though XLA may be
// faster from 16 on.
constexpr Index kGradientRows = 64;

// The same where weights may be rounded to x's dtype: amx_panel takes any number of rows of bfloat16 x.
constexpr Index most_rounded_rows(std::string_view isa, bool is_bf16) {
  return isa == "amx" && is_bf16 ? kAllRows : 0;
}

// Every product kernel has the epilogue, and a norm costs one more read of x: so a product that is faster than XLA
// without them is faster with them too.
constexpr RowLimits row_limits_of(std::string_view isa) {
  for (const MostRows& each : kMostRows)
    if (each.isa == isa)
      return {each.products, each.norms,    each.products,
              each.products, each.products, kGradientRows};
  return {0, 0, 0, 0, 0, 0};
}

}  // namespace jaxgemv::cpu
