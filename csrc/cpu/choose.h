// Which kernel for how many rows of x: what was measured (docs/cpu-notes.md, by section).
#pragma once

#include <limits>
#include <string_view>

#include "../kernel.h"
#include "../module.h"
#include "table.h"

namespace jaxgemv::cpu {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

// Of kernels that can run a call. Rows of the table are in order of preference too (isa/).
inline constexpr Crossover kCrossovers[] = {
    // "Slices on AMX": at 16 rows of 16 bits 1.8 ms for 1.9, at 8 1.8 for 1.5.
    {"amx_bf16", 0, 12, kAnyRows},
    // Where there are no slices.
    {"amx_bf16", 0, 3, kAnyRows, kAnyRows,
     [](const Problem& p) { return p.format != Format::kAffine; }},
    // There too: at two rows 0.96 ms for 1.32; at one 0.86 for the 0.68 of int8_dot.
    {"amx_int8", 0, 2, kAnyRows},
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

// Rows of x up to which kernels are faster than XLA, of products and of gradients ("Above 64 rows",
// "Any number of rows"): avxvnni takes as long as avx2, and portable stays at 64 until someone times it
// where there is nothing else, as amx does at 512.
struct MostRows {
  std::string_view isa;
  Index products, gradients;
};
inline constexpr MostRows kMostRows[] = {
    {"amx", 512, 512},         {"avx512bf16", kAllRows, 512}, {"avx512vbmi", kAllRows, 512},
    {"avx512", kAllRows, 512}, {"avxvnni", 256, 256},         {"avx2", 256, 256},
    {"portable", 64, 64},
};

// All products have the epilogue, and read x once more for a norm: what is faster than XLA without
// them is so with them.
constexpr Crossovers crossovers_of(std::string_view isa) {
  for (const MostRows& each : kMostRows)
    if (each.isa == isa)
      return {each.products, each.products, each.products, each.products, each.gradients};
  return {0, 0, 0, 0, 0};
}

}  // namespace jaxgemv::cpu
