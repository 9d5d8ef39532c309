// How a kernel is chosen, on every backend. A backend's table is an array of rows
//   struct { KernelInfo info; bool (*supports)(...); <whatever runs it>; }
// and `choose` picks one: of those that can run the call, the first that the backend's crossovers
// prefer for so many rows of x, else the first.
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

// Of a kernel that takes `set` with integer codes, what it takes with those of another format: no shifts; and where
// it has an epilogue, a global scale, which integers hardly ever have.
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

// A rule: where `kernel` is the fastest of those that can run a call. Rules stand in order of preference, and a kernel
// may come again behind another one.
struct Crossover {
  std::string_view kernel;
  int bits;                                // 0: any
  Index first, last;                       // rows of x of a slice, M: both included
  Index codes = kNoLimit;                  // the most in the matrices of all slices
  bool (*when)(const Problem&) = nullptr;  // what else has to hold
  OperandSet with = {};                    // of which the call has to have one, unless it is empty

  bool prefers(const KernelInfo& info, const Problem& problem, OperandSet given) const {
    return info.name == kernel && (bits == 0 || bits == problem.bits) && first <= problem.M &&
           problem.M <= last && problem.batch * problem.N * problem.K <= codes &&
           (when == nullptr || when(problem)) && (with.empty() || given.has_any(with));
  }
};

// What the kernels of a table take between them, for the product and for the transposed one; and `without_x` for that
// of the identity, if it may be left out.
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

// For tests and `bench.choices`: which kernel ran last, and the only one that may run, or null.
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
  const auto fits = [&](const KernelInfo& info) {
    return info.bits == problem.bits && info.x == problem.x && info.format == problem.format &&
           info.transposed == problem.transposed && given.without(info.operands).empty() &&
           (only.empty() || info.name == only);
  };
  std::vector<const Row*> rows;  // a few of hundreds: names are compared for these alone
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
