// Turns XLA's FFI buffers into a Problem and its Operands, or an ffi::Error. Both handlers (CPU, CUDA) use it.
//
// Python has already checked shapes and dtypes, with better messages. The checks here only make sure
// that a hand-made call cannot read foreign memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "call_reader.h"

namespace jaxgemv {

// The custom call, the same for the product and the transposed product. The attribute `operands` names its
// arrays in order, for example "x,packed,scale"; an array that the call lacks is not passed. The result is y.
//   x (B, M, K)   packed (S, N, words) uint32, (S, N, bytes) uint8, or weights (S, N, K) of a float8
//   scale, zero, offset (S | 1[, N[, G]])   global_scale (S | 1[, N])   codebook (S | 1, 2^bits)
//   norm (S | 1, K)
//   bias (S | 1, N)   residual (B, M, N)   index (B,)   -> y (B, M, N)
// x may be int8, then with x_scale (B, M, X) where X divides K; if there is also no scale, y and zero are int32.
// Attributes:
//   bits, group (int64), transposed (bool): if transposed, x is (B, M, N) and y (B, M, K)
//   eps (float32): of a norm, and required with one; round_norm, rounded (true, or absent): see Problem
//   activation: one of kActivationNames; with a gated one, y and residual are (B, M, N / 2)
//   entry (int64): the one stack entry that all of x is multiplied with, in place of index
//   k (int64): only without x; the real K, where rows of y are wider and are padded with zeros
// On CUDA a transposed call may leave x out, which stands for the identity: y (B, N, K) is the weights themselves.
// Names in operands.h that have no meaning yet are refused like unknown ones, until a kernel takes them.
struct Call {
  Problem problem;
  Operands operands;
  OperandSet given;                 // besides kRequired
  std::optional<Operand> met_by_y;  // an operand that overlaps y, besides x and residual

  static ffi::ErrorOr<Call> from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                 const ffi::Dictionary& attributes, const char* backend,
                                 const Taken& taken);

  // XLA may pass one buffer both as an operand and as y, for an in-place update. A kernel that reads the operand
  // while it writes y would race; for x this is allowed only if the kernel copies x first (`copies_x`).
  // The residual may be exactly y, but not overlap it partly; the bias may be y if y is a single row.
  std::optional<ffi::Error> overlap(bool copies_x) const;
};

// The FFI binding that both handlers share; each adds its own context. Scratch: nothing, or ffi::RemainingRets
// for scratch buffers.
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
