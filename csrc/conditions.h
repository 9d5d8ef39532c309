// Predicates on a Problem that the crossovers of both backends (choose.h) are made of, and ways to combine them.
#pragma once

#include "gemv.h"

namespace jaxgemv {

template <auto... kConditions>
constexpr bool all(const Problem& problem) {
  return (kConditions(problem) && ...);
}
template <auto... kConditions>
constexpr bool any(const Problem& problem) {
  return (kConditions(problem) || ...);
}
template <auto... kConditions>
constexpr bool none(const Problem& problem) {
  return !any<kConditions...>(problem);
}

constexpr bool has_integers(const Problem& problem) { return problem.format == Format::kAffine; }
constexpr bool has_table(const Problem& problem) { return problem.format == Format::kCodebook; }
constexpr bool has_float8(const Problem& problem) { return is_float8(problem.format); }

template <Dtype kDtype>
constexpr bool has_x(const Problem& problem) {
  return problem.x == kDtype;
}
constexpr bool has_16_bit_x(const Problem& problem) {
  return any<has_x<Dtype::kF16>, has_x<Dtype::kBF16>>(problem);
}

// At least kLeast bits a code.
template <int kLeast>
constexpr bool has_width(const Problem& problem) {
  return problem.bits >= kLeast;
}
constexpr bool has_one_group(const Problem& problem) { return problem.group >= problem.K; }
// Lower limits on N, on K, and on N * K in units of 2^20.
template <Index kLeast>
constexpr bool has_rows(const Problem& problem) {
  return problem.N >= kLeast;
}
template <Index kLeast>
constexpr bool has_columns(const Problem& problem) {
  return problem.K >= kLeast;
}
template <Index kLeast>
constexpr bool has_codes(const Problem& problem) {
  return problem.N * problem.K >= kLeast << 20;
}

}  // namespace jaxgemv
