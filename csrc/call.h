// From XLA's FFI buffers to a Problem and its Operands, or an ffi::Error. Both handlers use it.
//
// Python has checked shapes and dtypes already, with better messages; what is checked here is
// enough that a hand-made call cannot read foreign memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "call_reader.h"

namespace jaxgemv {

// The custom call, one for both products: arrays named by the attribute `operands`,
// "x,packed,scale" say, in that order, and a result y. Those that are absent are not passed.
//   x (B, M, K)   packed (S, N, words) uint32, (S, N, bytes) uint8, or weights (S, N, K) of a float8
//   scale, zero, offset (S | 1[, N[, G]])   global_scale (S | 1[, N])   codebook (S | 1, 2^bits)
//   norm (S | 1, K)
//   bias (S | 1, N)   residual (B, M, N)   index (B,)   -> y (B, M, N)
// x may be int8, then with x_scale (B, M, X), X a divisor of K; without scale y is int32, and so is zero.
// Attributes: bits, group (both int64), transposed (bool): then x is (B, M, N) and y (B, M, K);
// with norm eps (float32), and round_norm; activation (a name of kActivationNames): of a gated one y and residual
// are (B, M, N / 2); rounded (true): see Problem. On CUDA a transposed call may leave x out: it is the
// identity then, and y (B, N, K) the weights themselves; with k (int64), the K of these, rows of y may be
// wider, which gives zeros; entry (int64), in place of index: that of the stack which all of x meets. The
// other names in operands.h have no meaning yet: the call refuses them, as it refuses what it has never
// heard of, until a kernel takes them.
struct Call {
  Problem problem;
  Operands operands;
  OperandSet given;                 // besides kRequired
  std::optional<Operand> met_by_y;  // an operand in y's memory, that is not x or residual

  static ffi::ErrorOr<Call> from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                 const ffi::Dictionary& attributes, const char* backend,
                                 const Taken& taken);

  // XLA may hand over one slice of memory as an operand and as y of an in-place update. A kernel
  // that reads it while it writes y would race, unless it copies x before. Residual may be y itself,
  // but no other part of it, and so may the bias of one row.
  std::optional<ffi::Error> overlap(bool copies_x) const;
};

// The binding that both handlers share, to which each adds its own context. Scratch: nothing, or
// ffi::RemainingRets.
template <typename... Scratch>
auto bind_call() {
  auto results = ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>();
  if constexpr (sizeof...(Scratch) > 0)
    return std::move(results).RemainingRets().Attrs();
  else
    return std::move(results).Attrs();
}

inline ffi::ErrorOr<Call> Call::from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                     const ffi::Dictionary& attributes, const char* backend,
                                     const Taken& taken) {
  const auto attrs = detail::Attributes::from(attributes);
  if (attrs.has_error()) return ffi::Unexpected(attrs.error());
  const auto arrays = detail::to_arrays(args, attrs->operands);
  if (arrays.has_error()) return ffi::Unexpected(arrays.error());
  Call call;
  detail::CallReader reader(*arrays, *attrs, y, &call.problem, &call.operands);
  if (const auto wrong = reader.look_for_operands(backend, taken, &call.given))
    return ffi::Unexpected(*wrong);
  for (const auto read : {&detail::CallReader::read_sizes, &detail::CallReader::read_packed,
                          &detail::CallReader::read_scales, &detail::CallReader::read_parts,
                          &detail::CallReader::read_index})
    if (const auto wrong = (reader.*read)()) return ffi::Unexpected(*wrong);
  call.met_by_y = reader.met_by_y();
  return call;
}

inline std::optional<ffi::Error> Call::overlap(bool copies_x) const {
  const Problem& p = problem;
  if (!copies_x && x_meets_y(p, operands))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: x and the result share memory (an in-place update of a donated x "
                      "that the call reads); copy x, or do not donate it");
  if (met_by_y) {
    const std::string name(kOperandNames[static_cast<int>(*met_by_y)]);
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: " + name +
                          " and the result share memory (an in-place update of a "
                          "donated array that the call reads); copy " +
                          name + ", or do not donate it");
  }
  const Param& residual = operands.residual;
  const bool is_y = residual.data == operands.y && residual.dtype == p.y;
  const Index values = p.batch * p.M * p.y_width();
  if (!is_y && meets_y(p, operands, residual.data, values * size_of(residual.dtype)))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: residual and the result share memory, but not exactly (in-place "
                      "updates of different parts); copy residual, or do not donate it");
  return std::nullopt;
}

}  // namespace jaxgemv
