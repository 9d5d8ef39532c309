// What a gemv is, for every backend: shapes, pointers, and how a kernel is chosen.
// Nothing here knows CUDA, XLA or nanobind.
//
//   y[b, m, n] = bias[n] + sum_k x[b, m, k] * w[s, n, k],   s = index ? index[b] : 0
//   or transposed: y[b, m, k] = sum_n x[b, m, n] * w[s, n, k]
//   w[s, n, k] = (q[s, n, k] - zero[s, n, k / group]) * scale[s, n, k / group]
//              or q[s, n, k] * scale[...] + offset[...]
//
// An index outside [0, stack) fills its rows of y with NaN and reads no weights.
#pragma once

#include <cstdint>
#include <tuple>

#include "format.h"
#include "operands.h"

namespace jaxgemv {

enum class Dtype : uint8_t { kF16, kBF16, kF32 };

constexpr const char* name_of(Dtype dtype) {
  return dtype == Dtype::kF16 ? "float16" : dtype == Dtype::kBF16 ? "bfloat16" : "float32";
}
JAXGEMV_HD constexpr int size_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// How codes become weights; says what `shift` holds.
enum class Affine : uint8_t {
  kMid,     // (q - 2^(bits - 1)) * scale, no shift array
  kZero,    // (q - shift) * scale
  kOffset,  // q * scale + shift
};

// A parameter of the weights, (), (N,) or (N, G), each behind an optional stack dimension. A stride
// of 0 repeats the value along that dimension, so no shape needs a kernel of its own.
struct Param {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  Index stack_stride = 0;
  Index n_stride = 0;
  Index g_stride = 0;
};

struct Problem {
  Index batch = 1;  // slices of x, each with a stack entry of its own
  Index stack = 1;  // matrices in `packed`
  Index M = 0;      // rows of x in a slice
  Index N = 0;
  Index K = 0;
  Index group = 0;  // codes that share a scale; K when they all do
  int bits = 0;
  Dtype x = Dtype::kF32;
  Dtype y = Dtype::kF32;
  Affine affine = Affine::kMid;
  bool transposed = false;

  // Values in a row of x and of y.
  Index x_width() const { return transposed ? N : K; }
  Index y_width() const { return transposed ? K : N; }
};

struct Operands {
  const void* x = nullptr;          // (batch, M, K); transposed, (batch, M, N)
  const uint8_t* packed = nullptr;  // (stack or 1, N, row_bytes)
  Index packed_stack_stride = 0;    // in bytes; 0 when one matrix serves every index
  Param scale;                      // (N, G)
  Param shift;                      // (N, G) zero or offset, as Problem::affine says
  Param bias;                       // (N,), data is null without one
  const int32_t* index = nullptr;   // (batch,) or null
  void* y = nullptr;                // (batch, M, N); transposed, (batch, M, K)

  // The operands of a call whose batch starts at slice b.
  Operands from_slice(const Problem& problem, Index b) const {
    Operands part = *this;
    part.x = static_cast<const char*>(x) + b * problem.M * problem.x_width() * size_of(problem.x);
    part.y = static_cast<char*>(y) + b * problem.M * problem.y_width() * size_of(problem.y);
    if (index != nullptr) part.index += b;
    return part;
  }
};

// One compiled kernel, as Python and docs/kernels.md see it.
struct KernelInfo {
  const char* name;
  int bits;
  Dtype x;
  int rows;             // rows of x that share one read of the weights
  OperandSet operands;  // that it takes besides kRequired; it is not asked about a call with others
  bool transposed = false;
};

// What every kernel takes so far.
inline constexpr OperandSet kTransposedOperands =
    OperandSet::of(Operand::kZero, Operand::kOffset, Operand::kIndex);
inline constexpr OperandSet kProductOperands = kTransposedOperands | OperandSet::of(Operand::kBias);

// What the kernels of a table take between them, for the product and for the transposed one.
struct Taken {
  template <typename Kernels>
  explicit Taken(const Kernels& kernels) {
    for (const KernelInfo& kernel : kernels)
      by[kernel.transposed] = by[kernel.transposed] | kernel.operands;
  }

  OperandSet by[2];
};

// A kernel is a type with
//   static constexpr KernelInfo kInfo;
//   static bool accepts(const Problem&, const Operands&);   // shape, alignment, processor
//   static <status> run(...);
// and a backend's table is a std::tuple of such types, fastest first. `select` calls `run_with`
// with the first that matches bits and dtype, takes the operands that are given and accepts the
// problem, and with the next ones until a call is true; false when none is. `given`: the operands
// of the call besides kRequired. They are no part of Problem, which kernels get as it is.
template <typename Table, typename RunWith>
bool select(const Problem& problem, const Operands& operands, OperandSet given,
            RunWith&& run_with) {
  auto try_one = [&]<typename Kernel>(Kernel) {
    constexpr KernelInfo kInfo = Kernel::kInfo;
    if (kInfo.bits != problem.bits || kInfo.x != problem.x) return false;
    if (!given.without(kInfo.operands).empty()) return false;
    if (!Kernel::accepts(problem, operands)) return false;
    return run_with(Kernel{});
  };
  return std::apply([&](auto... kernels) { return (try_one(kernels) || ...); }, Table{});
}

inline bool is_aligned(const void* pointer, Index bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace jaxgemv
