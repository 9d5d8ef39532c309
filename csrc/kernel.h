// How a kernel is chosen, on every backend. A backend's table is an array of rows
//   struct { KernelInfo info; bool (*supports)(...); <whatever runs it>; }
// and `choose` picks one: of those that can run the call, the first that the backend's crossovers
// prefer for so many rows of x, else the first.
#pragma once

#include <algorithm>
#include <atomic>
#include <span>
#include <string_view>

#include "gemv.h"

namespace jaxgemv {

// One compiled kernel, as Python and docs/kernels.md see it.
struct KernelInfo {
  const char* name;
  Format format;
  int bits;
  Dtype x;
  int rows;             // rows of x that share one read of the weights
  OperandSet operands;  // that it takes besides kRequired; it is not asked about a call with others
  bool transposed = false;
};

// What every kernel takes.
inline constexpr OperandSet kTransposedOperands =
    OperandSet::of(Operand::kZero, Operand::kOffset, Operand::kIndex);
inline constexpr OperandSet kProductOperands = kTransposedOperands | OperandSet::of(Operand::kBias);
// What an epilogue takes that does more than add a bias.
inline constexpr OperandSet kEpilogueOperands =
    kProductOperands | OperandSet::of(Operand::kActivation, Operand::kResidual);

// Of a kernel that takes `set` with integer codes, what it takes with those of another format.
constexpr OperandSet with_format(OperandSet set, Format format) {
  constexpr OperandSet kShifts = OperandSet::of(Operand::kZero, Operand::kOffset);
  return format == Format::kAffine ? set
                                   : set.without(kShifts) | OperandSet::of(Operand::kCodebook);
}

// The rows of x of a slice, first <= M <= last, for which a kernel is the fastest of those that can
// run the call; bits 0 for all widths. In order of preference.
struct Crossover {
  std::string_view kernel;
  int bits;
  Index first, last;
};

// What the kernels of a table take between them, for the product and for the transposed one.
struct Taken {
  template <typename Table>
  explicit Taken(const Table& table) {
    for (const auto& row : table)
      by[row.info.transposed] = by[row.info.transposed] | row.info.operands;
  }

  OperandSet by[2];
};

// For tests: which kernel ran last, and the only one that may run, or null.
struct Trace {
  std::atomic<const char*> last = "";
  std::atomic<const char*> only = nullptr;
};

inline Trace& trace() {
  static Trace instance;
  return instance;
}

// The row that runs a call, or null. `given`: its operands besides kRequired; no part of Problem,
// which kernels get as it is. `only`: no kernel but those of this name, unless it is empty.
template <typename Row, typename Supports>
const Row* choose(std::span<const Row> table, std::span<const Crossover> crossovers,
                  const Problem& problem, OperandSet given, std::string_view only,
                  Supports&& supports) {
  const auto is_preferred = [&](const KernelInfo& info) {
    return std::any_of(crossovers.begin(), crossovers.end(), [&](const Crossover& c) {
      return (c.bits == 0 || c.bits == problem.bits) && c.first <= problem.M &&
             problem.M <= c.last && info.name == c.kernel;
    });
  };
  const Row* fallback = nullptr;
  for (const Row& row : table) {
    const KernelInfo& info = row.info;
    const bool fits = info.bits == problem.bits && info.x == problem.x &&
                      info.format == problem.format && info.transposed == problem.transposed &&
                      given.without(info.operands).empty() && (only.empty() || info.name == only);
    if (!fits) continue;
    const bool preferred = is_preferred(info);
    if ((!preferred && fallback != nullptr) || !supports(row)) continue;
    if (preferred) return &row;
    fallback = &row;
  }
  return fallback;
}

}  // namespace jaxgemv
