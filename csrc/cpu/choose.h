// Which kernel for how many rows of x: what was measured (docs/cpu-notes.md, by section).
#pragma once

#include <limits>
#include <string_view>

#include "../kernel.h"
#include "../module.h"
#include "table.h"

namespace jaxgemv::cpu {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

// Whether groups are at least 1 / `share` of 64 bytes, a row of an AMX tile: amx_bf16 and amx_int8 multiply
// that once for each group in it.
constexpr bool fills_tiles(const Problem& p, int share) {
  return p.group >= p.K || p.group * p.bits * share >= 64 * 8;
}
// Whether amx_panel looks up the weights of a codebook that divides bytes, or those of 3 and 5 bits by a table for two steps and more.
constexpr bool has_tables(const Problem& p) {
  const bool is_fast =
      4 % p.bits == 0 ? p.format == Format::kCodebook : p.bits <= 5 && p.group >= 64;
  return is_fast && p.N * p.K >= Index{1} << 19;
}
// Rows of the weight from which on it pays to cut x into slices for tiles of bytes.
constexpr Index kRowsForSlices = 512;

// Of kernels that can run a call. Rows of the table are in order of preference too (isa/).
inline constexpr Crossover kCrossovers[] = {
    // "Finished weights on AMX": from 65 rows on all; below, what others have no tiles for, or scale in
    // narrow groups.
    {"amx_panel", 0, 65, kAnyRows},
    {"amx_panel", 0, 3, 64, kAnyRows, nullptr, OperandSet::of(Operand::kOneByteScale)},
    {"amx_panel", 0, 4, 64, kAnyRows, has_tables},
    {"amx_panel", 0, 8, 64, kAnyRows,
     [](const Problem& p) {
       if (p.format != Format::kAffine || p.bits == 8) return false;
       return 4 % p.bits == 0 ? !fills_tiles(p, 2) : p.bits > 5 && fills_panels(p);
     }},
    {"amx_panel", 0, 12, 64, kAnyRows,
     [](const Problem& p) {
       return !is_float8(p.format) && (8 % p.bits != 0 || (p.bits == 8 && !fills_tiles(p, 1)));
     }},
    {"amx_panel", 0, 17, 64, kAnyRows,
     [](const Problem& p) {
       return p.format == Format::kAffine && (p.bits == 8 || !fills_tiles(p, 1));
     }},
    {"amx_panel", 0, 33, 64, kAnyRows, [](const Problem& p) { return !fills_tiles(p, 1); }},
    // "Slices on AMX", "Bytes on their way": int4 g128, bfloat16 x, three rows 0.75 ms for 0.90; float16 12 rows
    // 1.29 for 1.43. Of other formats there are no slices.
    {"amx_bf16", 0, 12, kAnyRows, kAnyRows, [](const Problem& p) { return fills_tiles(p, 2); }},
    {"amx_bf16", 0, 3, kAnyRows, kAnyRows,
     [](const Problem& p) {
       return p.format != Format::kAffine ||
              (p.bits == 4 && p.x == Dtype::kBF16 && fills_tiles(p, 2));
     }},
    // There too: at two rows 0.96 ms for 1.32; at one 0.86 for the 0.68 of int8_dot.
    {"amx_int8", 0, 2, 128, kAnyRows,
     [](const Problem& p) { return p.N >= kRowsForSlices && fills_tiles(p, 1); }},
    {"amx_int8", 0, 2, 16, kAnyRows,
     [](const Problem& p) { return p.N >= kRowsForSlices && fills_tiles(p, 2); }},
    // "Pairs of bfloat16 for few rows": at one row as fast or faster, at two 0.61 ms for 1.0.
    {"bf16_dot", 0, 1, 2},
    // "Which kernel for how many rows": at four rows 4.1 ms for 2.45.
    {"int8_dot", 0, 1, 2},
    // "Codes that stand for floats": there is nothing else for one and two rows but panels.
    {"f32_dot", 0, 1, 2},
    {"int8_panel", 0, 1, kAnyRows},
    {"bf16_panel", 0, 3, kAnyRows},
    {"f32_panel", 0, 1, kAnyRows},
    {"transposed", 0, 1, kAnyRows},
};

constexpr int kAllRows = 1 << 30;

// Rows of x up to which kernels are faster than XLA, of products and of gradients ("Above 64 rows",
// "Any number of rows"): avxvnni takes as long as avx2, and portable stays at 64 until someone times it
// where there is nothing else.
struct MostRows {
  std::string_view isa;
  Index products, gradients;
  Index norms = products;  // with a norm inside
};
inline constexpr MostRows kMostRows[] = {
    // Above 64 rows a normalised x of 16 bits may be rounded, as for amx_panel.
    {"amx", kAllRows, 512, 64}, {"avx512bf16", kAllRows, 512}, {"avx512vbmi", kAllRows, 512},
    {"avx512", kAllRows, 512},  {"avxvnni", 256, 256},         {"avx2", 256, 256},
    {"portable", 64, 64},
};

// Where weights may be rounded to x's dtype: amx_panel has all rows of bfloat16 x.
constexpr Index most_rounded_rows(std::string_view isa, bool is_bf16) {
  return isa == "amx" && is_bf16 ? kAllRows : 0;
}

// All products have the epilogue, and read x once more for a norm: what is faster than XLA without
// them is so with them.
constexpr Crossovers crossovers_of(std::string_view isa) {
  for (const MostRows& each : kMostRows)
    if (each.isa == isa)
      return {each.products, each.norms, each.products, each.products, each.gradients};
  return {0, 0, 0, 0, 0};
}

}  // namespace jaxgemv::cpu
