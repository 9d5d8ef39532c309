// How a kernel is chosen, on every backend. A backend's table is an array of rows
//   struct { KernelInfo info; bool (*supports)(...); <whatever runs it>; }
// From the rows that can run the call, `choose` takes the one that comes first in the backend's crossovers
// (its rules for this number of rows of x), or if no rule applies, the first in the table.
#pragma once

#include <atomic>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "gemv.h"

namespace jaxgemv {

// One compiled kernel, as Python and docs/kernels.md see it.
struct KernelInfo {
  const char* name;
  Format format;
  int bits;
  Dtype x;
  int rows;             // rows of x that share one read of the weights
  OperandSet operands;  // taken besides kRequired; calls with others never get here
  bool transposed = false;
};

// The operands, besides kRequired, that every kernel takes: of the transposed product, and of the product.
inline constexpr OperandSet kTransposedOperands =
    OperandSet::of(Operand::kZero, Operand::kOffset, Operand::kIndex);
inline constexpr OperandSet kProductOperands = kTransposedOperands | OperandSet::of(Operand::kBias);
// The operands of a kernel whose epilogue does more than add a bias.
inline constexpr OperandSet kEpilogueOperands =
    kProductOperands | OperandSet::of(Operand::kActivation, Operand::kResidual);

// If a kernel takes `set` with integer codes, the set that it takes with codes of `format`: no zero or offset, but a
// codebook if it is one; and with an epilogue also a global scale, which integers hardly ever have.
constexpr OperandSet with_format(OperandSet set, Format format) {
  constexpr OperandSet kShifts = OperandSet::of(Operand::kZero, Operand::kOffset);
  if (format == Format::kAffine) return set;
  const OperandSet table =
      format == Format::kCodebook ? OperandSet::of(Operand::kCodebook) : OperandSet{};
  const OperandSet global =
      set.has(Operand::kActivation) ? OperandSet::of(Operand::kGlobalScale) : OperandSet{};
  return set.without(kShifts) | table | global;
}

inline constexpr Index kNoLimit = std::numeric_limits<Index>::max();

// A rule that says where `kernel` is the fastest of those that can run a call. Rules stand in order of preference; a
// kernel may appear in several.
struct Crossover {
  std::string_view kernel;
  int bits;                                // 0: any
  Index first, last;                       // range of M, both ends included
  Index codes = kNoLimit;                  // upper limit on batch * N * K
  bool (*when)(const Problem&) = nullptr;  // a further condition, if any
  OperandSet with = {};                    // the call must have one of these, unless empty

  bool prefers(const KernelInfo& info, const Problem& problem, OperandSet given) const {
    return info.name == kernel && (bits == 0 || bits == problem.bits) && first <= problem.M &&
           problem.M <= last && problem.batch * problem.N * problem.K <= codes &&
           (when == nullptr || when(problem)) && (with.empty() || given.has_any(with));
  }
};

// The operands that at least one kernel of a table takes, for the product (by[0]) and the transposed one (by[1]);
// `without_x`: those of the transposed product with the identity, on backends where x may be left out.
struct Taken {
  template <typename Table>
  explicit Taken(const Table& table, std::optional<OperandSet> without_x = {})
      : without_x(without_x) {
    for (const auto& row : table)
      by[row.info.transposed] = by[row.info.transposed] | row.info.operands;
  }

  OperandSet by[2];
  std::optional<OperandSet> without_x;
};

// For tests and `bench.choices`: the kernel that ran last, and the only kernel that may run (or null for any).
struct Trace {
  std::atomic<const char*> last = "";
  std::atomic<const char*> only = nullptr;
};

inline Trace& trace() {
  static Trace instance;
  return instance;
}

// The row that runs a call, or null. given: the call's operands besides kRequired (not part of Problem, which the
// kernels get unchanged). only: if not empty, the name of the only kernel that may be chosen.
template <typename Row, typename Supports>
const Row* choose(std::span<const Row> table, std::span<const Crossover> crossovers,
                  const Problem& problem, OperandSet given, std::string_view only,
                  Supports&& supports) {
  const auto fits = [&](const KernelInfo& info) {
    return info.bits == problem.bits && info.x == problem.x && info.format == problem.format &&
           info.transposed == problem.transposed && given.without(info.operands).empty() &&
           (only.empty() || info.name == only);
  };
  std::vector<const Row*> rows;  // a few of hundreds: names are compared only for these
  for (const Row& row : table)
    if (fits(row.info)) rows.push_back(&row);
  for (const Crossover& crossover : crossovers)
    for (const Row* row : rows)
      if (crossover.prefers(row->info, problem, given) && supports(*row)) return row;
  for (const Row* row : rows)
    if (supports(*row)) return row;
  return nullptr;
}

}  // namespace jaxgemv
